"""A report as an HTML page with the source lines of calls, and as notebook output."""

from __future__ import annotations

import html
import importlib.util
import linecache
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..errors import HmpxError, passing_over
from ..files import SOURCE, read
from .cells import clean, count, dtypes, short_dtype, size
from .pages import filled, page, page_file, paragraphs
from .report import MOST_FIXES, Report, ended_with, fixes, kept_wide, sensitive, verdict
from .rows import Row, Totals, totals

#: Most fixes shown at the top; the table of casts has all.
_MOST_FIXES: Final = 20

#: For source code: context lines, lines of all files, calls named for a line.
_CONTEXT, _MOST_LINES, _MOST_CALLS = 3, 1_000, 4


def report_page(report: Report) -> str:
    """Returns the page."""
    files = source_files(report.rows, [each.location for each in report.waste])
    found = fixes(report.waste)
    body = filled(
        page_file("report.html"),
        verdict=verdict(report),
        sensitive=sensitive(report),
        error=ended_with(report) if report.error else "",
        fixes=found[:_MOST_FIXES],
        kept=kept_wide(report)[:_MOST_FIXES],
        fixes_left_out=count(max(0, len(found) - _MOST_FIXES)),
        files=files,
        clean=clean,
        wasted=size(sum(each.bytes for each in report.waste)),
    )
    return page(
        f"hmpx report: {verdict(report)}",
        "Precision report",
        body,
        report.about,
        script=page_file("report.js"),
        data=_data(report, files),
    )


def notebook_part(report: Report) -> str:
    """Returns the verdict, fixes and the table by op, as HTML without scripts."""
    parts = [f"<p><strong>{html.escape(verdict(report))}</strong></p>"]
    parts.append(paragraphs([*sensitive(report), *[ended_with(report)] * bool(report.error)]))
    items = [
        f"<li><code>{html.escape(fix.line)}</code><br>{html.escape(fix.reason)}</li>"
        for fix in fixes(report.waste)[:MOST_FIXES]
    ]
    if items:
        parts.append(f"<ol>{''.join(items)}</ol>")
    if kept := kept_wide(report)[:MOST_FIXES]:
        items = [f"<li>{html.escape(each)}</li>" for each in kept]
        parts.append(f"<p>Not in low precision, and why:</p><ul>{''.join(items)}</ul>")
    if report.rows:
        parts.append(report.by_op().html_table())
    return f"<div>{''.join(parts)}</div>"


def _data(report: Report, files: Iterable[File]) -> dict[str, Any]:
    """Returns the script's data: rows, waste and modules; strings are indices into one list."""
    texts: dict[str, int] = {}

    def places(*found: str) -> list[int]:
        return [texts.setdefault(clean(text), len(texts)) for text in found]

    anchors = {
        f"{file.path}:{line.number}": f"line-{i}-{line.number}"
        for i, file in enumerate(files)
        for line in file.lines
    }
    locations = [row.location for row in report.rows] + [w.location for w in report.waste]
    rows = [
        [
            *places(row.op, row.phase, dtypes(row.input_dtypes), short_dtype(row.dtype) or "-"),
            *places(dtypes(row.output_dtypes), row.module, row.location, row.device_type),
            *places(row.reason),
            int(row.is_low),
            *(row.calls, row.casts, row.cast_bytes, row.flops, row.bytes, row.seconds),
        ]
        for row in report.rows
    ]
    waste = [
        [*places(w.kind, w.what, w.module, w.location, w.fix, w.note), w.times, w.bytes]
        for w in report.waste
    ]
    modules = [
        [*places(path, name), parent, *sums]
        for path, name, parent, sums in module_tree(report.rows)
    ]
    return {
        "texts": list(texts),
        "rows": rows,
        "waste": waste,
        "modules": modules,
        "links": {clean(each): anchors[each] for each in locations if each in anchors},
    }


def module_tree(rows: Iterable[Row]) -> list[tuple[str, str, int, Totals]]:
    """Returns the modules, parents first: path, name, the parent's index, and sums of all inside.

    The first is the outermost, with parent -1.
    """
    inside: dict[tuple[str, ...], list[Row]] = {(): []}
    for row in sorted(rows, key=lambda row: row.module):
        split = tuple(row.module.split(".")) if row.module else ()
        for end in range(len(split) + 1):
            inside.setdefault(split[:end], []).append(row)
    places = {split: index for index, split in enumerate(inside)}
    return [
        (".".join(split), "".join(split[-1:]), places[split[:-1]] if split else -1, totals(several))
        for split, several in inside.items()
    ]


# --- source --------------------------------------------------------------------------------------


class SourceLine(NamedTuple):
    """A line of a file: the dtypes and calls at it, and whether lines before it are omitted."""

    number: int
    text: str
    precision: str
    calls: tuple[str, ...]
    follows_gap: bool


class File(NamedTuple):
    """A file's lines with calls, and the lines around them; a note says why lines are missing."""

    path: str
    lines: tuple[SourceLine, ...]
    note: str = ""


def source_files(rows: Iterable[Row], locations: Iterable[str] = ()) -> list[File]:
    """Returns the files with calls, the most expensive first; ``locations`` are other lines to show."""
    found: dict[str, dict[int, list[Row]]] = {}
    for location, several in [(r.location, [r]) for r in rows] + [(each, []) for each in locations]:
        path, _, number = location.rpartition(":")
        if path and number.isascii() and number.isdecimal() and int(number[:9]) > 0:
            found.setdefault(path, {}).setdefault(int(number), []).extend(several)
    files: list[File] = []
    for path, by_number in found.items():
        most = _MOST_LINES - sum(len(file.lines) for file in files)
        files.append(_file(path, by_number, most))
    return files


def _file(path: str, by_number: Mapping[int, Sequence[Row]], most: int) -> File:
    # A report may come from someone else, so it can name any path. Only Python files are read, and none from
    # another machine, since the access itself would reveal the reader.
    if not path.endswith(".py"):
        return File(path, (), "not shown: only .py files are")
    if path.startswith(("//", r"\\")):
        return File(path, (), "not shown: it is on another machine")
    source: list[str] = []
    with passing_over(HmpxError, OSError, SyntaxError, ValueError):
        if Path(path).exists():
            source = importlib.util.decode_source(read(path, SOURCE)).splitlines()
        else:  # the cells of a notebook are in the cache
            source = linecache.getlines(path)
    if not source:
        return File(path, (), "not shown: it can't be read here")
    shown = sorted(
        {
            near
            for number in by_number
            if number <= len(source)
            for near in range(max(1, number - _CONTEXT), min(len(source), number + _CONTEXT) + 1)
        }
    )
    notes = []
    if max(by_number) > len(source):
        notes.append("the file has changed since: it is now shorter")
    if len(shown) > most:
        notes.append(f"{count(len(shown) - most)} more lines are left out")
    lines = []
    for before, number in zip([0, *shown], shown[:most], strict=False):
        rows = by_number.get(number, [])
        code = clean(source[number - 1].rstrip().expandtabs(4))
        kinds = {row.is_low for row in rows}
        precision = (
            "mixed" if len(kinds) > 1 else "".join("low" if each else "wide" for each in kinds)
        )
        lines.append(SourceLine(number, code, precision, _calls(rows), number != before + 1))
    return File(path, tuple(lines), "; ".join(notes))


def _calls(rows: Iterable[Row]) -> tuple[str, ...]:
    times: dict[tuple[str, str, str], int] = {}
    for row in rows:
        key = (row.op, row.dtype, "" if row.phase == "forward" else f" ({row.phase})")
        times[key] = times.get(key, 0) + row.calls
    said = [
        f"{clean(op)}{clean(phase)} in {short_dtype(dtype) or '-'} \N{MULTIPLICATION SIGN} {count(n)}"
        for (op, dtype, phase), n in times.items()
    ]
    more = len(said) - _MOST_CALLS
    return (*said[:_MOST_CALLS], f"and {count(more)} more") if more > 0 else tuple(said)
