"""A run's record, its views, and reading it from JSON; errors name the file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, NamedTuple

from .. import files, ops
from ..errors import brief, raised_here, short
from .cells import clean, count, dtypes, located, share, short_dtype, size, wrapped
from .groups import Groups, grouped
from .pages import Written
from .rows import WIDE, Row, Totals, Waste, added, added_waste, totals
from .table import ReportTable

#: The version of the JSON that `Report.to_json` writes.
SCHEMA: Final = 1

#: The fields that files of any time have.
_ALWAYS: Final = frozenset({"rows", "waste", "about", "error"})


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
        from .report_page import report_page

        return report_page(self.report())

    def __str__(self) -> str:
        return "\n".join(_lines(self.report()))

    def _repr_html_(self) -> str:
        from .report_page import notebook_part

        return notebook_part(self.report())


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
    """Merges the reports of several processes into one; rows are added up."""
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
        if isinstance(found, dict) and (version := found.pop("hmpx_report", None)) != SCHEMA:
            raise ValueError(f"version {version}")
        if isinstance(found, dict) and (lacking := sorted(_ALWAYS - found.keys())):
            raise ValueError(f" lacks {lacking[0]}")
        return files.shaped(found, Report)  # type: ignore[no-any-return]
    except raised_here(ValueError) as error:
        raise files.damaged(name, files.REPORT, error) from None


# --- as text -------------------------------------------------------------------------------------

#: Most fixes shown; the others are only counted.
MOST_FIXES: Final = 5


def _lines(report: Report) -> Iterator[str]:
    yield from verdict(report).split("; ")
    if report.error:
        yield from wrapped(ended_with(report))
    for said in sensitive(report):
        yield from wrapped(said)
    found = fixes(report.waste)
    if found:
        yield from ("", "fixes, those that save most first:")
    for fix in found[:MOST_FIXES]:
        yield from wrapped(fix.line, "  ")
        yield from wrapped(fix.reason, "      ")
        if fix.note:
            yield from wrapped(f"({fix.note})", "      ")
    if (more := len(found) - MOST_FIXES) > 0:
        yield f"... and {count(more)} more; rec.waste() has all"
    kept = kept_wide(report)
    if kept:
        yield from ("", "not in low precision, and why:")
    for said in kept[:MOST_FIXES]:
        yield from wrapped(said, "  ")
    if (more := len(kept) - MOST_FIXES) > 0:
        yield f"... and {count(more)} more; hmpx.explain(op) has all"
    if report.rows:
        yield from ("", *report.by_op().lines(20, "rec.by_op()"))


# --- sentences -----------------------------------------------------------------------------------


def verdict(report: Report) -> str:
    """Returns the low-precision share and the bytes written by casts, in a sentence."""
    sums = report.totals
    if not sums.calls:
        if not report.about or "policy" in report.about:
            return "No calls were recorded."
        return "No calls were recorded; torch was not converted: hmpx.convert() comes first"
    parts = [
        (sums.low_flops, sums.flops, "FLOPs"),
        (sums.low_bytes, sums.bytes, "bytes"),
        (sums.low_calls, sums.calls, "calls"),
    ]
    shares = [f"{share(low, whole)} of {name}" for low, whole, name in parts if whole > 0]
    if len(shares) > 1:
        shares[-2:] = [f"{shares[-2]} and {shares[-1]}"]
    casts = "1 cast" if sums.casts == 1 else f"{count(sums.casts)} casts"
    wrote = f"{casts} wrote {size(sums.cast_bytes)}" if sums.casts else "nothing was cast"
    return f"{', '.join(shares)} in low precision; {_computed(report)}{wrote}"


def _computed(report: Report) -> str:
    """Returns how much of the low-precision work ran natively, and how much in fp32."""
    rows = [row for row in report.rows if row.is_low]
    name, costs = "FLOPs", [row.flops for row in rows]
    if not any(costs):
        name, costs = "calls", [row.calls for row in rows]
    low = sum(costs)
    if not low:
        return ""
    native = sum(cost for row, cost in zip(rows, costs, strict=True) if not row.legalized)
    return (
        f"of these {name}, {share(native, low)} were computed natively, "
        f"{share(low - native, low)} in fp32 and rounded; "
    )


#: Roles of ops that accuracy depends on most, as reports name them.
_PARTS: Final = {"loss": "losses", "norm": "norms", "sum": "sums of tensors, as of residuals"}


def sensitive(report: Report) -> list[str]:
    """Says which parts that accuracy depends on are in low precision, which are not, and what float16 lacks."""
    found: dict[str, list[tuple[Row, str]]] = {}
    for row in report.rows:
        role = "" if row.phase == "backward" else ops.role(row.op)
        if role and (role != "sum" or len(row.input_dtypes) > 1):
            found.setdefault(_PARTS[role], []).append((row, row.dtype))
        # Wide ones may have been low, and upcast by the program.
        if role == "loss" and not WIDE.issuperset(row.input_dtypes[:1]):
            found.setdefault("inputs of losses", []).append((row, row.input_dtypes[0]))
    low, wide = [], []
    for part, calls in found.items():
        hits = [(row, dtype) for row, dtype in calls if dtype not in WIDE]
        if not hits:
            wide.append(part)
            continue
        first, dtype = max(hits, key=lambda hit: hit[0].calls)
        more = sum(row.calls for row, _ in hits) - 1
        place = f"{short_dtype(dtype)} in {first.op} at {located(first.location)}"
        low.append(f"{part} ({place}{f' and {count(more)} more' * (more > 0)})")
    for name, several in sorted(report.optimizers.items()):
        if WIDE.issuperset(several.split(", ")):
            wide.append(name)
        else:
            low.append(f"{name} ({dtypes(several.split(', '))})")
    said = [f"low, of what accuracy depends on most: {', '.join(low)}"] if low else []
    said += [f"not low: {', '.join(wide)}"] if wide else []
    halves = [
        row for row in report.rows if row.phase == "backward" and "float16" in row.input_dtypes
    ]
    if halves and report.about.get("loss scaler") == "none":
        said.append("gradients in fp16 without torch.amp.GradScaler: small ones may be lost")
    return [clean(each) for each in said]


def ended_with(report: Report) -> str:
    """Returns the error that ended the run and its place, on one line."""
    said = f"the run ended with: {clean(' '.join((report.error or '').split()))}"
    return f"{said}, at {clean(report.error_location)}" if report.error_location else said


def kept_wide(report: Report) -> list[str]:
    """Returns each op that did not run in low precision, with its share and reason, the largest first."""
    name = "bytes" if report.totals.bytes > 0 else "calls"
    costs: dict[tuple[str, str], int] = {}
    for row in report.rows:
        if not row.is_low:
            key = row.op, row.reason
            costs[key] = costs.get(key, 0) + getattr(row, name)
    whole = getattr(report.totals, name)
    return [
        f"{clean(op)}, {share(cost, whole)} of {name}: {clean(reason) or 'no reason recorded'}"
        for (op, reason), cost in sorted(costs.items(), key=lambda each: -each[1])
    ]


# --- fixes ---------------------------------------------------------------------------------------


class Fix(NamedTuple):
    """A line to copy, a sentence on the waste that it removes, and its cost, or ""."""

    line: str
    reason: str
    note: str


def fixes(waste: Iterable[Waste]) -> list[Fix]:
    """Returns each fix once, the largest savings first."""
    found: dict[str, list[Waste]] = {}
    for each in waste:
        if each.fix:
            found.setdefault(each.fix, []).append(each)
    return [
        Fix(
            clean(line),
            _reason(several),
            clean("; ".join(dict.fromkeys(each.note for each in several if each.note))),
        )
        for line, several in sorted(found.items(), key=lambda each: -_bytes(each[1]))
    ]


def _bytes(waste: Iterable[Waste]) -> int:
    return sum(each.bytes for each in waste)


def _reason(waste: list[Waste]) -> str:
    first = max(waste, key=lambda each: each.bytes)
    where = f" at {located(first.location)}" if first.location else ""
    often = f", {count(first.times)} times" if first.times > 1 else ""
    more = f", and {count(len(waste) - 1)} more" if len(waste) > 1 else ""
    saved = f"{size(_bytes(waste))}: " if _bytes(waste) > 0 else ""
    return f"{saved}{clean(first.kind)}, {clean(first.what)}{where}{often}{more}"
