"""Output of the command line: results to stdout, messages to stderr."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from .. import phases
from ..errors import OptionError, passing_over, printable, short

#: Exit status after Ctrl-C, as in shells.
INTERRUPTED: Final = 130

#: Seconds after which a terminal shows how long a command has taken.
AFTER_S: Final = 5.0

#: Ends the line of `show_seconds`, if there is one.
seconds: Final = contextlib.ExitStack()


def show_seconds(command: str) -> None:
    """Shows on stderr, if it is a terminal, what a command does and for how long, until its next output or ``seconds.close()``."""
    if not (sys.stderr and sys.stderr.isatty()):
        return
    phases.enter("")
    terminal, start, line, is_over = sys.stderr.fileno(), time.monotonic(), "", False

    def show_line() -> None:
        nonlocal line
        with passing_over(OSError):
            while not is_over:
                passed_s = time.monotonic() - start
                now = ", ".join(
                    filter(None, [f"hmpx {command}: {passed_s:.0f} s", phases.entered()])
                )
                if passed_s >= AFTER_S and now != line:
                    # Not by `sys.stderr`, whose lock a fork may copy.
                    os.write(terminal, f"\r{now:{len(line)}}".encode(errors="replace"))
                    line = now
                time.sleep(0.1)

    def end() -> None:
        nonlocal is_over
        is_over = True
        thread.join()
        with passing_over(OSError):
            os.write(terminal, f"\r{' ' * len(line)}\r".encode() if line else b"")

    thread = threading.Thread(target=show_line, daemon=True)
    thread.start()
    seconds.callback(end)


def show(lines: Iterable[str], status: int = 0) -> int:
    """Prints ``lines`` to stdout and returns ``status``; a closed pipe is not an error."""
    seconds.close()
    try:
        for line in lines:
            try:
                print(line)
            except UnicodeEncodeError:  # file names may contain any bytes
                print(line.encode("utf-8", "backslashreplace").decode("ascii", "backslashreplace"))
        sys.stdout.flush()
    except BrokenPipeError:
        # Discards buffered output, about which the interpreter would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def check_writable(option: str, name: str | None) -> None:
    """Rejects an unwritable file before anything slow runs."""
    if name is None:
        return
    if Path(name).is_dir():
        raise OptionError(f"{option} {short(name)} is a directory; name a file in it")
    if not Path(name).parent.is_dir():
        directory = short(str(Path(name).parent))
        raise OptionError(f"{option} {short(name)}: there is no directory {directory}")


def written(
    options: argparse.Namespace, result: object, **others: Callable[[str], object]
) -> Iterator[str]:
    """Writes a result to the files of ``others``, --html, --json and --csv, as far as given; yields a line on each."""
    of_result = {name: getattr(result, f"to_{name}", None) for name in ("html", "json", "csv")}
    for name, write in (others | of_result).items():
        path = getattr(options, name, None)
        if path and write is not None:
            write(path)
            yield f"wrote {short(path)}"


def complain(message: str) -> None:
    """Prints a message to stderr, if the program left it open; each of its lines begins with ``hmpx:``."""
    seconds.close()
    with passing_over(OSError, ValueError):
        for line in message.splitlines():
            print(f"hmpx: {printable(line)}", file=sys.stderr)


def with_warnings_shown(function: Callable[..., Any], **arguments: Any) -> Any:
    """Calls ``function`` and prints its warnings as messages of the command line."""
    with warnings.catch_warnings(record=True) as caught:
        result = function(**arguments)
    for warning in caught:
        complain(f"warning: {warning.message}")
    return result


def counted(count: int, noun: str) -> str:
    """Returns ``"1 file"``, ``"2 files"``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
