"""A run's record, its views by group, as text and as JSON; errors name the file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from .. import files, ops
from ..errors import brief, fielded, raised_here, short
from . import cells
from .cells import clean, count, dtypes, located, share, short_dtype, size, wrapped
from .pages import Written
from .rows import WIDE, Row, Totals, Waste, added, added_waste, totals
from .table import Column, ReportTable

if TYPE_CHECKING:
    from ..policy import Policy

#: Phases as tables show them.
_PHASES: Final = {"forward": "", "backward": "bwd", "recompute": "redo"}


#: Field that groups share -> its title in tables, its formatter, how it is cut, its minimum width.
_NAMES: Final[dict[str, tuple[str, Callable[[str], str], Any, int]]] = {
    "op": ("op", lambda name: clean(name) or cells.NOTHING, cells.without_end, 10),
    "phase": ("phase", lambda phase: _PHASES.get(phase, clean(phase)), cells.without_end, 4),
    "input_dtypes": ("from", lambda names: dtypes(names.split(", ")), cells.without_end, 9),
    "dtype": ("in", lambda names: dtypes(names.split(", ")), cells.without_end, 4),
    "output_dtypes": ("to", lambda names: dtypes(names.split(", ")), cells.without_end, 9),
    "module": ("module", lambda name: clean(name) or "(outermost)", cells.without_start, 12),
    "location": (
        "location",
        lambda line: located(line) or cells.NOTHING,
        cells.without_start,
        16,
    ),
}


@dataclass(frozen=True)
class Group:
    """Rows with something in common, and their sums.

    The shared fields and the sums are also attributes: ``group.op``, ``group.calls``, ``group.bytes``.

    Attributes:
        names: Names of the shared fields: ``("location", "op")``.
        key: Values of the shared fields: ``("train.py:12", "linear")``.
        totals: Their sums.
        rows: The rows.
    """

    names: tuple[str, ...]
    key: tuple[str, ...]
    totals: Totals
    rows: tuple[Row, ...]

    __repr__ = fielded

    def __getattr__(self, name: str) -> Any:
        names = self.__dict__.get("names", ())  # copying asks for attributes before they exist
        if name in names:
            return self.key[names.index(name)]
        if name in Totals._fields:
            return getattr(self.totals, name)
        known = ", ".join((*names, *Totals._fields))
        raise AttributeError(f"this group has no {name!r}; it has {known}")


class Groups(list[Group]):
    """Groups of rows; printing them prints a table."""

    def table(self, most: int | None = None) -> ReportTable:
        """Returns a table of the first ``most`` groups; shares are of all groups.

        Omits columns without information, such as those of casts if there are none.
        """
        shown = self[:most]
        names = shown[0].names if shown else ()
        keys = [
            Column(title, [g.key[index] for g in shown], show, False, cut, least, title == "in")
            for index, (title, show, cut, least) in enumerate(map(_NAMES.__getitem__, names))
        ]
        return ReportTable(
            [each for each in keys if each.title != "phase" or any(each.cells)]
            + _sums([group.totals for group in shown], [group.totals for group in self], names)
        )

    def lines(self, most: int, call: str) -> list[str]:
        """Returns the table's lines, and how many more groups ``call`` gives."""
        more = len(self) - most
        rest = [f"... and {count(more)} more; {call} has all"] if more > 0 else []
        return [*self.table(most).lines(), *rest]

    def html_table(self) -> str:
        """Returns the table as HTML, without scripts or styles."""
        if not self:
            return "<p>no calls</p>"
        more = len(self) - 100
        return self.table(100).to_html() + (f"<p>... and {more:,} more</p>" if more > 0 else "")

    def __repr__(self) -> str:
        return f"<hmpx.Groups: {len(self):,} groups; print() shows them>"

    def __str__(self) -> str:
        return str(self.table()) if self else "no calls"

    def _repr_html_(self) -> str:
        return self.html_table()


def grouped(rows: Iterable[Row], names: Sequence[str]) -> Groups:
    """Groups rows with equal fields of these names; those with most FLOPs, then bytes, come first."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        values = [getattr(row, name) for name in names]
        key = [each if isinstance(each, str) else ", ".join(dict.fromkeys(each)) for each in values]
        found.setdefault(tuple(key), []).append(row)
    groups = [
        Group(tuple(names), key, totals(several), tuple(several)) for key, several in found.items()
    ]
    return Groups(sorted(groups, key=lambda group: (-group.totals.flops, -group.totals.bytes)))


def _sums(shown: Sequence[Totals], every: Sequence[Totals], names: Sequence[str]) -> list[Column]:
    has_casts = any(each.casts for each in every)
    flops, bytes_ = sum(each.flops for each in every), sum(each.bytes for each in every)
    found = [
        (True, Column("calls", [each.calls for each in shown], count)),
        ("dtype" not in names, Column("low", [*map(_low_share, shown)])),
        (has_casts, Column("casts", [each.casts for each in shown], count)),
        (has_casts, Column("written", [each.cast_bytes for each in shown], size)),
        (flops > 0, Column("FLOPs", [share(each.flops, flops) for each in shown])),
        (bytes_ > 0, Column("bytes", [share(each.bytes, bytes_) for each in shown])),
        (
            any(each.seconds is not None for each in every),
            Column("time", [each.seconds for each in shown], cells.duration),
        ),
    ]
    return [column for is_shown, column in found if is_shown]


def _low_share(sums: Totals) -> str:
    """Returns the low-precision share: of FLOPs, without any of bytes, or else of calls."""
    if sums.flops:
        return share(sums.low_flops, sums.flops)
    if sums.bytes:
        return share(sums.low_bytes, sums.bytes)
    return share(sums.low_calls, sums.calls)


#: The version of the JSON that `Report.to_json` writes.
SCHEMA: Final = 1

#: The fields that files of any time have.
_ALWAYS: Final = frozenset({"rows", "waste", "about", "error"})


class Views(Written):
    """The views of a report; a subclass has `report`."""

    report: Callable[[], Report]  # The record so far, as data

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

    def policy(self) -> Policy:
        """Returns a policy under which these calls run in the same types, also if torch.autocast decided them.

        An op that ran in several types is decided by module. Where it did so in one module, the most expensive
        call decides, and a warning names the others. Types of accumulation are not recorded.

        Example:
            >>> import torch, hmpx
            >>> model, x = torch.nn.Linear(4, 4), torch.ones(1, 4)
            >>> with hmpx.convert(policy={"lists": "none"}, device_types={"cpu"}), hmpx.record() as rec:
            ...     with torch.autocast("cpu", torch.float16):
            ...         y = model(x).softmax(-1)
            >>> rec.policy()
            <hmpx.Policy fp16: 1 LOW>
        """
        from .recorded import recorded_policy

        return recorded_policy(self.report().rows)

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
