"""A report on a terminal, in colours, where `rich` is installed; its plain text elsewhere."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any, TextIO

from .fixes import fixes
from .tables import columns
from .text import MOST_FIXES, MOST_GROUPS, ended_with, more, verdict

if TYPE_CHECKING:
    from .report import Report


def show(report: Report, file: TextIO | None = None) -> None:
    """Writes the report to ``file``, or to stdout."""
    stream = sys.stdout if file is None else file
    if not stream.isatty() or importlib.util.find_spec("rich") is None:
        stream.write(f"{report}\n")
        return
    console = importlib.import_module("rich.console").Console(file=stream)
    for part in _parts(report):
        console.print(part)


def _parts(report: Report) -> list[Any]:
    """Returns the report's parts, as rich shows them; text of users is never read as markup."""
    Text = importlib.import_module("rich.text").Text  # noqa: N806
    Padding = importlib.import_module("rich.padding").Padding  # noqa: N806
    parts: list[Any] = [Text(verdict(report.totals), style="bold")]
    if report.error:
        parts.append(Text(ended_with(report.error), style="bold red"))
    found = fixes(report.waste)
    if found:
        parts.append(Text("\nfixes, those that save most first:"))
    for fix in found[:MOST_FIXES]:
        parts.append(Padding(Text(fix.line, style="green"), (0, 0, 0, 2)))
        about = f"{fix.reason}\n({fix.note})" if fix.note else fix.reason
        parts.append(Padding(Text(about), (0, 0, 0, 6)))
    parts += [Text(line) for line in more(len(found) - MOST_FIXES, "rec.waste()")]
    if report.rows:
        parts += [Text(""), _table(report)]
        parts += [Text(line) for line in more(len(report.by_op()) - MOST_GROUPS, "rec.by_op()")]
    return parts


def _table(report: Report) -> Any:
    Table = importlib.import_module("rich.table").Table  # noqa: N806
    Text = importlib.import_module("rich.text").Text  # noqa: N806
    groups = report.by_op()
    found = columns(groups, groups.titles, MOST_GROUPS)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in found:
        table.add_column(column.title, justify="right" if column.is_number else "left")
    for group, *cells in zip(groups, *(column.cells for column in found), strict=False):
        is_low = group.totals.low_calls > 0
        styles = {"in": "blue" if is_low else "yellow"}
        table.add_row(
            *(
                Text(cell, style=styles.get(column.title, ""))
                for column, cell in zip(found, cells, strict=True)
            )
        )
    return table
