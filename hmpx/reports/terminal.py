"""A report on a terminal, in colours, where `rich` is installed; its plain text elsewhere."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

from .cells import WIDTH
from .fixes import fixes
from .tables import table_rows
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
    for part in _parts(report, max(WIDTH, console.width)):
        console.print(part)


def _parts(report: Report, columns: int) -> list[Any]:
    """Returns the report's parts, as rich shows them; text of users is never read as markup."""
    Text = importlib.import_module("rich.text").Text  # noqa: N806
    Padding = importlib.import_module("rich.padding").Padding  # noqa: N806
    parts: list[Any] = [Text(verdict(report), style="bold")]
    if report.error:
        parts.append(Text(ended_with(report), style="bold red"))
    found = fixes(report.waste)
    if found:
        parts.append(Text("\nfixes, those that save most first:"))
    for fix in found[:MOST_FIXES]:
        parts.append(Padding(Text(fix.line, style="green"), (0, 0, 0, 2)))
        about = f"{fix.reason}\n({fix.note})" if fix.note else fix.reason
        parts.append(Padding(Text(about), (0, 0, 0, 6)))
    parts += [Text(line) for line in more(len(found) - MOST_FIXES, "rec.waste()")]
    if report.rows:
        parts += [Text(""), *_lines(report, columns)]
        parts += [Text(line) for line in more(len(report.by_op()) - MOST_GROUPS, "rec.by_op()")]
    return parts


def _lines(report: Report, columns: int) -> Iterator[Any]:
    """Yields the lines of the table by op; the type that an op computed in has a colour."""
    Text = importlib.import_module("rich.text").Text  # noqa: N806
    groups = report.by_op()
    titles, *rows = table_rows(groups, groups.titles, MOST_GROUPS, columns)
    yield Text("".join(titles).rstrip(), style="bold")
    place = next(i for i, title in enumerate(titles) if title.strip() == "in")
    for group, cells in zip(groups, rows, strict=False):
        line = Text()
        for i, cell in enumerate(cells):
            style = "blue" if group.totals.low_calls else "yellow"
            line.append(cell, style=style if i == place else "")
        line.rstrip()
        yield line
