"""A run's record, its views, and reading it from JSON; errors name the file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

from .. import files
from ..errors import brief, raised_here, short
from . import report_page, text
from .groups import Groups, grouped
from .pages import Written
from .rows import Row, Totals, Waste, added, added_waste, totals
from .table import ReportTable

#: The version of the JSON that `Report.to_json` writes.
SCHEMA: Final = 1


class Views(Written):
    """The views of a report; a subclass has `report`."""

    def report(self) -> Report:
        """Returns the record so far, as data."""
        raise NotImplementedError

    def by_op(self) -> Groups:
        """Groups the calls by op, phase and dtypes, with ``group.op``, ``group.calls`` and so on."""
        names = ("op", "phase", "input_dtypes", "dtype", "output_dtypes")
        return grouped(self.report().rows, names)

    def by_module(self) -> Groups:
        """Groups the calls by module, without the modules inside it."""
        return grouped(self.report().rows, ("module",))

    def by_site(self) -> Groups:
        """Groups the calls by program line and op."""
        return grouped(self.report().rows, ("location", "op"))

    def _table(self) -> ReportTable:
        return ReportTable.of_fields([each.name for each in fields(Row)], self.report().rows)

    def _data(self) -> Mapping[str, Any]:
        report = self.report()
        return {
            "hmpx_report": SCHEMA,
            "about": dict(report.about),
            "error": report.error,
            "error_location": report.error_location,
            "optimizers": dict(report.optimizers),
            "rows": [asdict(each) for each in report.rows],
            "waste": [asdict(each) for each in report.waste],
        }

    def _page(self) -> str:
        return report_page.report_page(self.report())

    def __str__(self) -> str:
        return "\n".join(text.lines(self.report()))

    def _repr_html_(self) -> str:
        return report_page.notebook_part(self.report())


@dataclass(frozen=True)
class Report(Views):
    """A recorded run.

    Printing it shows a verdict, fixes for needless casts, and a table by op.

    Attributes:
        rows: The calls, the most expensive first.
        waste: Unnecessary casts, those with most bytes first.
        about: Names and values that identify the run: versions, policy, device, rank.
        error: The exception that ended the run, if any.
        error_location: The program line that raised it, ``"train.py:12"``, if known.
        optimizers: Name of an optimizer's parameters or state, ``"AdamW.exp_avg"`` -> the names of its dtypes.

    Example:
        >>> from hmpx.reports import Report
        >>> print(Report(rows=(), error="KeyError: 'x'"))
        No calls were recorded.
        the run ended with: KeyError: 'x'
    """

    rows: tuple[Row, ...]
    waste: tuple[Waste, ...] = ()
    about: Mapping[str, str] = field(default_factory=dict)
    error: str | None = None
    error_location: str = field(default="", repr=False)
    optimizers: Mapping[str, str] = field(default_factory=dict, repr=False)

    __repr__ = brief

    def report(self) -> Report:
        """Returns this report."""
        return self

    @property
    def totals(self) -> Totals:
        """Sums over all rows."""
        return totals(self.rows)


def merged(reports: Iterable[Report]) -> Report:
    """Merges the reports of several processes into one; rows are added up.

    Example:
        >>> from hmpx.reports import Report, merged
        >>> merged([Report((), about={"rank": "0"}), Report((), about={"rank": "1"})]).about
        {'rank': '0, 1'}
    """
    reports = list(reports)

    def joined(mappings: Iterable[Mapping[str, str]]) -> dict[str, str]:
        values: dict[str, dict[str, None]] = {}
        for each in mappings:
            for name, value in each.items():
                values.setdefault(name, {}).update({value: None})
        return {name: ", ".join(several) for name, several in values.items()}

    errors = [report.error for report in reports if report.error]
    locations = [report.error_location for report in reports if report.error_location]
    return Report(
        added(row for report in reports for row in report.rows),
        added_waste(each for report in reports for each in report.waste),
        joined(report.about for report in reports),
        "; ".join(dict.fromkeys(errors)) or None,
        ", ".join(dict.fromkeys(locations)),
        joined(report.optimizers for report in reports),
    )


# --- reading -------------------------------------------------------------------------------------


def read_json(path: str | os.PathLike[str]) -> Report:
    """Returns the report that `Report.to_json` wrote to ``path``.

    Raises:
        OptionError: The file can't be read, or holds no report.
    """
    name = short(os.fspath(path))
    found = files.parsed(files.read_text(path, files.REPORT), name, files.REPORT)
    try:
        if isinstance(found, dict) and found.get("hmpx_report") != SCHEMA:
            raise ValueError(f"version {found.get('hmpx_report')}")
        content = files.shaped(found, _Content)
    except raised_here(ValueError) as error:
        raise files.damaged(name, files.REPORT, error) from None
    return Report(
        content.rows,
        content.waste,
        content.about,
        content.error,
        content.error_location,
        content.optimizers,
    )


@dataclass(frozen=True)
class _Content:
    """The content of a file."""

    hmpx_report: int
    rows: tuple[Row, ...]
    waste: tuple[Waste, ...]
    about: Mapping[str, str]
    error: str | None
    error_location: str = ""
    optimizers: Mapping[str, str] = field(default_factory=dict)
