"""Output of the command line: results to stdout, messages to stderr."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from ..errors import OptionError, printable, short

#: Colour names -> their codes for terminals.
_COLOURS: Final = {"blue": "34", "bold": "1", "dim": "2", "red": "31", "yellow": "33"}

#: Minimum width of a table's last column, and its indent below the other columns if there is less room.
_LEAST: Final = 24
_INDENT: Final = 4


def show(lines: Iterable[str], status: int = 0) -> int:
    """Prints ``lines`` to stdout and returns ``status``; a closed pipe is not an error."""
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
    """Rejects an unwritable file before anything slow runs.

    Raises:
        OptionError: It is a directory, or in one that does not exist.
    """
    if name is None:
        return
    if Path(name).is_dir():
        raise OptionError(f"{option} {short(name)} is a directory; name a file in it")
    if not Path(name).parent.is_dir():
        directory = short(str(Path(name).parent))
        raise OptionError(f"{option} {short(name)}: there is no directory {directory}")


def written(options: argparse.Namespace, **writers: Callable[[str], object]) -> Iterator[str]:
    """Writes the files of these options, and yields a line on each."""
    for name, write in writers.items():
        path = getattr(options, name)
        if path:
            write(path)
            yield f"wrote {path}"


def complain(message: str) -> None:
    """Prints a message to stderr; each of its lines begins with ``hmpx:``."""
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


def is_terminal() -> bool:
    """Whether a person reads the output."""
    return sys.stdout.isatty()


def painted(text: str, colour: str | None) -> str:
    """Returns ``text`` in a colour of `_COLOURS`, if stdout is a terminal and ``NO_COLOR`` is not set."""
    if colour is None or not is_terminal():
        return text
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"


def table(
    rows: Sequence[Sequence[str]], colours: Callable[[Sequence[str]], Sequence[str | None]]
) -> Iterator[str]:
    """Yields the lines of a table; on a terminal the last column is wrapped to fit.

    Args:
        rows: Rows with the same number of cells; the first has the titles.
        colours: Returns the colours of a row's cells, except the last one.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    used = sum(widths) + 2 * len(widths)
    columns = shutil.get_terminal_size().columns if is_terminal() else 0
    is_beside = not columns or columns - used >= _LEAST
    indent = used if is_beside else _INDENT
    for index, row in enumerate(rows):
        chosen = ["bold"] * len(row) if not index else [*colours(row), None]
        padded = [*map(str.ljust, row, widths), row[-1]]
        if not is_beside:
            padded[-2] = row[-2]
        *cells, _ = map(painted, padded, chosen)
        last = [row[-1]]
        if columns:
            room = max(columns - indent, _LEAST)
            last = textwrap.wrap(row[-1], room, break_long_words=False) or [""]
        if is_beside:
            cells.append(painted(last.pop(0), chosen[-1]))
        yield "  ".join(cells)
        for more in last:
            yield " " * indent + painted(more, chosen[-1])
