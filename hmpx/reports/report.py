"""A run's record, its views, and reading it from JSON; errors name the file."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, TextIO, TypeVar, get_type_hints

from ..errors import OptionError, said_by, shown, suggestion
from . import report_page, text
from .cells import is_measured
from .files import written
from .groups import Groups, grouped
from .rows import Row, Totals, Waste, added, added_waste, totals
from .table import Table

#: The version of the JSON that `Report.to_json` writes.
SCHEMA: Final = 1


class Views:
    """The views of a report; a subclass has `report`."""

    def report(self) -> Report:
        """Returns the record so far, as data."""
        raise NotImplementedError

    def by_op(self) -> Groups:
        """Groups the calls by op, phase and dtypes, with ``group.op``, ``group.calls`` and so on.

        Example:
            >>> from hmpx.reports import Report
            >>> print(Report(rows=()).by_op())
            no calls
        """
        names = ("op", "phase", "input_dtypes", "dtype", "output_dtypes")
        return grouped(self.report().rows, names)

    def by_module(self) -> Groups:
        """Groups the calls by module, without the modules inside it.

        Example:
            >>> from hmpx.reports import Report
            >>> [(group.module, group.bytes) for group in Report(rows=()).by_module()]
            []
        """
        return grouped(self.report().rows, ("module",))

    def by_site(self) -> Groups:
        """Groups the calls by program line and op.

        Example:
            >>> from hmpx.reports import Report
            >>> [(group.location, group.op, group.calls) for group in Report(rows=()).by_site()]
            []
        """
        return grouped(self.report().rows, ("location", "op"))

    def print(self, file: TextIO | None = None) -> None:
        """Writes the report to ``file`` or stdout, in colours on a terminal if `rich` is installed.

        Example:
            >>> from hmpx.reports import Report
            >>> Report(rows=()).print()
            No calls were recorded.
        """
        text.show(self.report(), file)

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns the report as JSON, and writes it to ``path`` if given.

        Raises:
            OptionError: The file can't be written.

        Example:
            >>> from hmpx.reports import Report
            >>> Report(rows=()).to_json().split()[1:3]
            ['"hmpx_report":', '1,']
        """
        report = self.report()
        rows = [each if is_measured(each.seconds) else _untimed(each) for each in report.rows]
        found = {
            "hmpx_report": SCHEMA,
            "about": dict(report.about),
            "error": report.error,
            "error_location": report.error_location,
            "rows": [asdict(each) for each in rows],
            "waste": [asdict(each) for each in report.waste],
        }
        return written(json.dumps(found, indent=1) + "\n", path)[:-1]

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns the rows as CSV, and writes them to ``path`` if given.

        Text that a spreadsheet would evaluate, such as a module named ``=1+1``, gets a leading ``'``.

        Raises:
            OptionError: The file can't be written.

        Example:
            >>> from hmpx.reports import Report
            >>> Report(rows=()).to_csv().split(",")[:3]
            ['op', 'site', 'module']
        """
        return written(_table(self.report().rows).to_csv(), path)

    def to_dataframe(self) -> Any:
        """Returns the rows as a `pandas.DataFrame`; several dtypes in a row become one string.

        Raises:
            OptionError: pandas isn't installed.

        Example:
            >>> from hmpx.reports import Report
            >>> frame = Report(rows=()).to_dataframe()  # doctest: +SKIP
        """
        return _table(self.report().rows).to_dataframe()

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns the report as one HTML page that needs no network; writes it to ``path`` if given.

        It shows the source lines around calls, as the Python files are now.

        Raises:
            OptionError: The file can't be written.

        Example:
            >>> from hmpx.reports import Report
            >>> Report(rows=()).to_html().partition(">")[0]
            '<!DOCTYPE html'
        """
        return written(report_page.report_page(self.report()), path)

    def __str__(self) -> str:
        return text.text(self.report())

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

    def report(self) -> Report:
        """Returns this report."""
        return self

    @functools.cached_property
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
    about: dict[str, dict[str, None]] = {}
    for report in reports:
        for name, value in report.about.items():
            about.setdefault(name, {}).update({value: None})
    errors = [report.error for report in reports if report.error]
    locations = [report.error_location for report in reports if report.error_location]
    return Report(
        added(row for report in reports for row in report.rows),
        added_waste(each for report in reports for each in report.waste),
        {name: ", ".join(values) for name, values in about.items()},
        "; ".join(dict.fromkeys(errors)) or None,
        ", ".join(dict.fromkeys(locations)),
    )


def _untimed(row: Row) -> Row:
    return replace(row, seconds=None)


def _table(rows: Iterable[Row]) -> Table:
    """Returns the rows as a table: several dtypes become one string, invalid times None."""
    names = [each.name for each in fields(Row)]
    found = [
        [
            ", ".join(value) if isinstance(value, tuple) else value
            for value in (getattr(row, name) for name in names)
        ]
        for row in (each if is_measured(each.seconds) else _untimed(each) for each in rows)
    ]
    return Table.of(names, found)


# --- reading -------------------------------------------------------------------------------------

_T = TypeVar("_T", Row, Waste)


def _is_number(value: Any) -> bool:
    # Larger integers have no float.
    return type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


#: Type of a field -> its description, and whether a value from JSON has it.
_KINDS: Final[Mapping[Any, Any]] = {
    str: ("a text", lambda value: isinstance(value, str)),
    int: ("a whole number, 0 or more", lambda value: type(value) is int and value >= 0),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    tuple[str, ...]: ("a list of texts", _is_texts),
    float | None: ("a number or null", lambda value: value is None or _is_number(value)),
}


def read_json(path: str | os.PathLike[str]) -> Report:
    """Returns the report that `Report.to_json` wrote to ``path``.

    Raises:
        OptionError: The file can't be read, or holds no report.

    Example:
        >>> import os, tempfile
        >>> from hmpx.reports import Report, read_json
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Report(rows=()).to_json(os.path.join(folder, "report.json"))
        ...     read_json(os.path.join(folder, "report.json"))
        Report(rows=(), waste=(), about={}, error=None)
    """
    name = os.fspath(path)
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise OptionError(f"{name}: {error.strerror or said_by(error)}") from error
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{name} is not JSON, or was cut short: {said_by(error)}") from error
    if not isinstance(found, dict) or found.get("hmpx_report") != SCHEMA:
        raise OptionError(
            f"{name} is not a report of this version of hmpx; write one with "
            "`hmpx run --report report.json script.py`"
        )
    try:
        return _report(found)
    except OptionError as error:
        raise OptionError(f"{name} is damaged: {error}; write the report again") from None


def _report(found: Mapping[str, Any]) -> Report:
    about, error = found.get("about"), found.get("error")
    location = found.get("error_location", "")
    for name, value, is_right, said in (
        (
            "about",
            about,
            isinstance(about, dict) and _is_texts([*about.values()]),
            "map texts to texts",
        ),
        ("error", error, error is None or isinstance(error, str), "be a text or null"),
        ("error_location", location, isinstance(location, str), "be a text"),
    ):
        if not is_right:
            raise OptionError(f"{name!r} must {said}, not {shown(value)}")
    rows, waste = _items(Row, found, "rows"), _items(Waste, found, "waste")
    return Report(rows, waste, about or {}, error, location)


def _items(kind: type[_T], found: Mapping[str, Any], key: str) -> tuple[_T, ...]:
    items = found.get(key)
    if not isinstance(items, list):
        raise OptionError(f"{key!r} must be a list, not {shown(items)}")
    hints = get_type_hints(kind)
    return tuple([_item(kind, hints, item, f"{key}[{i}]") for i, item in enumerate(items)])


def _item(kind: type[_T], hints: Mapping[str, Any], item: Any, where: str) -> _T:
    if not isinstance(item, dict):
        raise OptionError(f"{where} must be an object, not {shown(item)}")
    for name in item:
        if name not in hints:
            raise OptionError(f"{where} has an unknown {shown(name)}{suggestion(name, hints)}")
    for name, hint in hints.items():
        if name not in item:
            raise OptionError(f"{where} has no {name!r}")
        said, is_one = _KINDS[hint]
        if not is_one(item[name]):
            raise OptionError(f"{name!r} of {where} must be {said}, not {shown(item[name])}")
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in item.items()
    }
    return kind(**values)
