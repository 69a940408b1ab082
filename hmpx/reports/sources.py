"""The lines of the program that made calls, with what they computed in, read when a page is made."""

from __future__ import annotations

import linecache
import stat
import tokenize
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from .cells import clean, count, short_dtype
from .rows import Row

_CONTEXT: Final = 3  # lines above and below
_MOST_LINES: Final = 1_000
_MOST_BYTES: Final = 4_000_000
_MOST_SAID: Final = 4


class Line(NamedTuple):
    """A line of a file.

    Attributes:
        number: From 1.
        text: The line.
        precision: ``"low"``, ``"wide"`` or ``"mixed"``; ``""`` of a line that made no calls.
        calls: What it called: ``"linear in bf16, 12 times"``.
        follows_gap: Whether lines before it are not shown.
    """

    number: int
    text: str
    precision: str
    calls: tuple[str, ...]
    follows_gap: bool


@dataclass(frozen=True)
class File:
    """What is shown of a file.

    Attributes:
        path: Its path.
        lines: Lines that made calls, with those around them.
        note: Why lines are missing, or "".
    """

    path: str
    lines: tuple[Line, ...]
    note: str = ""


def split_location(location: str) -> tuple[str, int]:
    """Returns path and line of ``"train.py:12"``; line 0 if there is none."""
    path, _, number = location.rpartition(":")
    is_number = number.isascii() and number.isdecimal() and len(number) < 9
    return (path, int(number)) if is_number and path else (location, 0)


def source_files(rows: Iterable[Row], locations: Iterable[str] = ()) -> list[File]:
    """Returns the files that the calls were made in, those that cost most first.

    Args:
        rows: The calls.
        locations: Other lines to show.
    """
    found: dict[str, dict[int, list[Row]]] = {}
    for row in rows:
        path, number = split_location(row.location)
        if number:
            found.setdefault(path, {}).setdefault(number, []).append(row)
    for location in locations:
        path, number = split_location(location)
        if number:
            found.setdefault(path, {}).setdefault(number, [])
    files: list[File] = []
    for path, by_number in found.items():
        most = _MOST_LINES - sum(len(file.lines) for file in files)
        files.append(_file(path, by_number, most))
    return files


def _file(path: str, by_number: dict[int, list[Row]], most: int) -> File:
    source = _read(path)
    if isinstance(source, str):
        return File(path, (), source)
    shown = sorted(
        {
            near
            for number in by_number
            if number <= len(source)
            for near in range(max(1, number - _CONTEXT), min(len(source), number + _CONTEXT) + 1)
        }
    )
    notes = []
    if any(number > len(source) for number in by_number):
        notes.append("the file has changed since: it is now shorter")
    if len(shown) > most:
        notes.append(f"{count(len(shown) - most)} more lines are left out")
    lines = []
    before = 0
    for number in shown[:most]:
        rows = by_number.get(number, [])
        code = clean(source[number - 1].rstrip().expandtabs(4))
        lines.append(Line(number, code, _precision(rows), _calls(rows), number != before + 1))
        before = number
    return File(path, tuple(lines), "; ".join(notes))


def _read(path: str) -> list[str] | str:
    """Returns the lines of a Python file, or why it isn't shown.

    A report may come from somebody else: only Python files are read, whatever paths it names, and
    none of another machine, which would be told who asks.
    """
    if not path.endswith(".py"):
        return "not shown: only .py files are"
    if path.startswith(("//", r"\\")):
        return "not shown: it is on another machine"
    try:
        if path in linecache.cache and not Path(path).exists():  # the cells of a notebook
            return linecache.getlines(path)
        found = Path(path).stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
            return "not shown: it is too large, or not a file"
        with tokenize.open(path) as file:
            return file.read().removesuffix("\n").split("\n")  # as Python counts lines
    except (OSError, ValueError, SyntaxError):
        return "not shown: it can't be read here"


def _precision(rows: Sequence[Row]) -> str:
    kinds = {row.is_low for row in rows}
    if not kinds:
        return ""
    return "mixed" if len(kinds) > 1 else "low" if kinds == {True} else "wide"


def _calls(rows: Iterable[Row]) -> tuple[str, ...]:
    times: dict[tuple[str, str, str], int] = {}
    for row in rows:
        key = (row.op, row.dtype, "" if row.phase == "forward" else f" ({row.phase})")
        times[key] = times.get(key, 0) + row.calls
    said = [
        f"{clean(op)}{clean(phase)} in {short_dtype(dtype) or '-'} \N{MULTIPLICATION SIGN} {count(n)}"
        for (op, dtype, phase), n in times.items()
    ]
    more = len(said) - _MOST_SAID
    return (*said[:_MOST_SAID], f"and {count(more)} more") if more > 0 else tuple(said)
