"""A report as one HTML page without a network, and as a part of a notebook.

The page is a template, a style and a script in ``page/``. Text of users gets into it escaped, or as JSON
that the script shows as text; its policy lets no other script run, and nothing be loaded.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from .cells import clean, count, dtypes, short_dtype, size
from .fixes import fixes
from .module_tree import module_tree
from .pages import page_file, rendered
from .rows import Row, Totals, is_measured
from .sources import File, source_files
from .tables import html_table
from .text import MOST_FIXES, ended_with, verdict

if TYPE_CHECKING:
    from .report import Report

#: How many fixes are written at the top; the table of casts has all.
_MOST_FIXES: Final = 20

#: The largest number that is passed on to JavaScript: sums of it are finite there, too.
_LARGEST: Final = 10**300


def page(report: Report) -> str:
    """Returns the page."""
    files = source_files(report.rows, [each.location for each in report.waste])
    found = fixes(report.waste)
    values = {
        "verdict": verdict(report),
        "error": ended_with(report) if report.error else "",
        "fixes": found[:_MOST_FIXES],
        "fixes_left_out": count(max(0, len(found) - _MOST_FIXES)),
        "about": {clean(name): clean(value) for name, value in report.about.items()},
        "files": files,
        "clean": clean,
        "wasted": size(sum(each.bytes for each in report.waste)),
    }
    template, style, script = (
        page_file(str(__package__), f"report.{kind}") for kind in ("html", "css", "js")
    )
    return rendered(template, style, script, _tables(report, files), values)


class _Texts:
    """Texts, each once: tables refer to them by their places."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}

    def place(self, text: str) -> int:
        return self.places.setdefault(text, len(self.places))


def _tables(report: Report, files: Iterable[File]) -> dict[str, Any]:
    """Returns what the script shows: rows, waste and modules, all texts by their places in one list."""
    texts = _Texts()
    place = texts.place
    anchors = {
        f"{file.path}:{line.number}": f"line-{i}-{line.number}"
        for i, file in enumerate(files)
        for line in file.lines
    }
    rows = [
        [
            *map(place, _row_texts(row)),
            int(row.is_low),
            *map(_number, (row.calls, row.casts, row.cast_bytes, row.flops, row.bytes)),
            row.seconds if is_measured(row.seconds) else None,
        ]
        for row in report.rows
    ]
    waste = [
        [
            *map(place, map(clean, (w.kind, w.what, w.module, w.location, w.fix, w.note))),
            _number(w.times),
            _number(w.bytes),
        ]
        for w in report.waste
    ]
    modules = [
        [place(clean(node.path)), place(clean(node.name)), node.parent, *_sums(node.totals)]
        for node in module_tree(report.rows)
    ]
    locations = [row.location for row in report.rows] + [each.location for each in report.waste]
    links = {clean(each): anchors[each] for each in locations if each in anchors}
    return {
        "texts": list(texts.places),
        "rows": rows,
        "waste": waste,
        "modules": modules,
        "links": links,
    }


def _row_texts(row: Row) -> tuple[str, ...]:
    return (
        clean(row.op),
        clean(row.phase),
        dtypes(row.input_dtypes),
        short_dtype(row.dtype) or "-",
        dtypes(row.output_dtypes),
        clean(row.module),
        clean(row.location),
        clean(row.device_type),
        clean(row.reason),
    )


def _number(number: int) -> int:
    return min(number, _LARGEST)


def _sums(sums: Totals) -> list[float | None]:
    return [*map(_number, sums[:-1]), sums.seconds]


def notebook_part(report: Report) -> str:
    """Returns the verdict, fixes and the table by op as HTML without scripts."""
    parts = [f"<p><strong>{html.escape(verdict(report))}</strong></p>"]
    if report.error:
        parts.append(f"<p>{html.escape(ended_with(report))}</p>")
    found = fixes(report.waste)[:MOST_FIXES]
    if found:
        items = "".join(
            f"<li><code>{html.escape(fix.line)}</code><br>{html.escape(fix.reason)}</li>"
            for fix in found
        )
        parts.append(f"<ol>{items}</ol>")
    groups = report.by_op()
    if groups:
        parts.append(html_table(groups, groups.titles))
    return f"<div>{''.join(parts)}</div>"
