"""``hmpx run --report``: records a program, and writes the report also if the program crashes or exits."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from ..errors import said_by, short
from ..recording import record
from ..reports import Report, written
from . import output
from .scripts import ScriptError


def _to_text(report: Report, path: Path) -> None:
    written(f"{report}\n", path)


#: How a report is written, by the end of the file's name.
_WRITERS: Final[dict[str, Callable[[Report, Path], object]]] = {
    ".json": Report.to_json,
    ".html": Report.to_html,
    ".csv": Report.to_csv,
    ".txt": _to_text,
}


def checked(name: str) -> Path:
    """Returns the path to write a report to: of several processes, each has its own.

    Raises:
        ScriptError: The name's end says no format, it is a directory, or its directory does not exist.
    """
    path = Path(name)
    if path.suffix.lower() not in _WRITERS:
        *names, last = _WRITERS
        raise ScriptError(
            f"--report {short(name)}: unknown format; end the name in {', '.join(names)} or {last}"
        )
    if path.is_dir():
        raise ScriptError(f"--report {short(name)} is a directory; name a file in it")
    if not path.parent.is_dir():
        raise ScriptError(
            f"--report {short(name)}: there is no directory {short(str(path.parent))}"
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        path = path.with_suffix(f".rank{os.environ.get('RANK', '0')}{path.suffix}")
    return path.absolute()  # the program may change its directory


@contextlib.contextmanager
def recorded(path: Path | None, *, replaces: bool = True) -> Iterator[None]:
    """Records what runs inside, and writes the report to ``path``, even after an exception.

    Args:
        path: Where to; None to record nothing.
        replaces: Whether a file that is there is replaced. If not, the report gets a name beside it: one
            command may run several programs, whose reports are all wanted.
    """
    if path is None:
        yield
        return
    recording = record()
    try:
        with recording:
            yield
    finally:
        _write(recording, path if replaces else _free(path))


def _free(path: Path) -> Path:
    """Returns ``path``, or a name that is this process's own where that is taken."""
    return path.with_suffix(f".{os.getpid()}{path.suffix}") if path.exists() else path


def _write(recording: record, path: Path) -> None:
    """Writes the report; where it can't, says so: the program has ended as it would without a report."""
    try:
        report = recording.report()
        _WRITERS[path.suffix.lower()](report, path)
        verdict = str(report).splitlines()[0]
    except Exception as error:
        output.complain(f"the report can't be written: {said_by(error)}")
    else:
        sys.stdout.flush()
        output.complain(f"{verdict}\nreport: {path}")
