"""``hmpx run --report``: records a program and its forks; writes the report however the program ends."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from .. import patching
from ..errors import raised_here, said_by, short
from ..files import unwritable
from ..patching import Patch
from ..recording import record
from ..reports import Report, merged, read_json, written
from . import output
from .scripts import ScriptError

#: Extension of the report's path -> its writer.
_WRITERS: Final[dict[str, Callable[[Report, Path], object]]] = {
    ".json": Report.to_json,
    ".html": Report.to_html,
    ".csv": Report.to_csv,
    ".txt": lambda report, path: written(f"{report}\n", path),
}


def checked(name: str) -> Path:
    """Returns the path for a report; each of several processes has its own."""
    path = Path(name)
    if path.suffix.lower() not in _WRITERS:
        *names, last = _WRITERS
        raise ScriptError(
            f"--report {short(name)}: unknown format; end the name in {', '.join(names)} or {last}"
        )
    output.check_writable("--report", name)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        path = path.with_suffix(f".rank{os.environ.get('RANK', '0')}{path.suffix}")
    return path.absolute()  # the program may change its directory


#: Functions that end a process at once, and signals by which schedulers and others end processes.
_ENDS: Final = ("_exit", "abort", "execv", "execve")
_SIGNALS: Final = ("SIGTERM", "SIGHUP")


@contextlib.contextmanager
def recorded(path: Path | None, *, replaces: bool = True) -> Iterator[None]:
    """Records the block, and writes the report to ``path``, however the process ends.

    A forked process writes its part to a temporary folder. This process merges it into the report. Without
    ``replaces`` an existing file stays: one command may run several programs, each with its report.
    """
    if path is None:
        yield
        return
    recording, process = record(), os.getpid()
    is_taken = path.exists() and not replaces
    target = path.with_suffix(f".{process}{path.suffix}") if is_taken else path
    try:
        folder = Path(tempfile.mkdtemp(prefix="hmpx-report-"))
    except raised_here(OSError) as error:
        raise unwritable(tempfile.gettempdir(), error) from error

    def write(error: str | None = None) -> None:
        # Without raising, since the program's exit status must not change.
        try:
            if os.getpid() == process:
                _write(recording, target, folder, error)
            elif folder.exists():  # else the report has been written
                _write_part(recording, folder, error)
        except Exception as failure:
            output.complain(f"the report can't be written: {said_by(failure)}")

    def forget() -> None:
        if folder.exists():
            recording.forget()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=forget)
    ends = patching.apply([Patch(os, name, _writing(name, write)) for name in _ENDS])
    with _signals_followed(write):
        try:
            with recording:
                yield
        finally:
            patching.undo(ends)
            write()


def _writing(name: str, write: Callable[[str], None]) -> Callable[..., Any]:
    function = getattr(os, name)

    @functools.wraps(function)
    def end(*args: Any, **kwargs: Any) -> Any:
        write(f"os.{name}")
        return function(*args, **kwargs)

    end.__module__ = os.__name__  # where pickle looks it up
    return end


@contextlib.contextmanager
def _signals_followed(write: Callable[[str], None]) -> Iterator[None]:
    """Writes the report before a signal ends the process."""
    numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
    followed = [each for each in numbers if signal.getsignal(each) is signal.SIG_DFL]

    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)  # so that another signal ends the process at once
        write(signal.Signals(number).name)
        os.kill(os.getpid(), number)

    for each in followed:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each in followed:
            if signal.getsignal(each) is end:
                signal.signal(each, signal.SIG_DFL)


def _report(recording: record, error: str | None) -> Report:
    report = recording.report()
    return dataclasses.replace(report, error=error) if error else report


def _write_part(recording: record, folder: Path, error: str | None) -> None:
    """Writes the record of a forked process; `os._exit`, by which forks always end, is not an error."""
    report = _report(recording, None if error == "os._exit" else error)
    if report.rows:
        report.to_json(folder / f"{os.getpid()}-{secrets.token_hex(8)}.json")


def _write(recording: record, path: Path, folder: Path, error: str | None) -> None:
    try:
        report = _report(recording, error)
        if parts := [read_json(each) for each in sorted(folder.glob("*.json"))]:
            report = merged([report, *parts])
        _WRITERS[path.suffix.lower()](report, path)
        verdict = str(report).splitlines()[0]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(ValueError):  # the program may have closed it
        sys.stdout.flush()
    output.complain(f"{verdict}\nreport: {path}")
