"""The result of `diff_runs`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from ..errors import brief
from ..places import located
from ..renames import renamed_fields
from ..reports import (
    Column,
    ReportTable,
    Written,
    by_depth,
    chart_section,
    clean,
    count,
    exponential,
    page,
    paragraphs,
    short_dtype,
    table_section,
    without_start,
)

#: Verdicts that nothing explains.
_UNEXPLAINED: Final = ("unexplained", "only in a", "only in b")

#: In the order in which they are counted.
VERDICTS: Final = ("equal", "rounding", "inherited", *_UNEXPLAINED, "not compared")


@renamed_fields(rel="error")
@dataclass(frozen=True, slots=True, repr=False)
class RunDiffRow:
    """A call in both runs, or in one of them.

    Attributes:
        op: Op name; ``"gradient"`` for the gradient of a parameter; the class of an optimizer.
        module: Qualified name of the module, or of the parameter.
        location: The user's line, in run b if run a has none.
        phase: ``"forward"``: the call's result; ``"backward"``: the gradient that comes into it;
            ``"optimizer"``: an optimizer that steps with other settings in run b.
        verdict: See `diff_runs`.
        error: L2 norm of the difference over run a's norm, estimated; NaN if not compared.
        uncertainty: Its standard error.
        explained: The largest relative difference that types and inputs explain.
        cause: The cause; ``""`` if the trace shows none.
        types: The dtypes that it computed in, in both runs.
        decisions: The decision about them: ``"bfloat16, by lists/hmpx/bf16.txt:20"``.
        locations: The user's lines, in both runs.
        step: Number of the step.
    """

    op: str
    module: str
    location: str
    phase: str
    verdict: str
    error: float
    uncertainty: float
    explained: float
    cause: str
    types: tuple[str, str]
    decisions: tuple[str, str]
    locations: tuple[str, str]
    step: int

    @property
    def is_unexplained(self) -> bool:
        """Whether nothing explains the difference."""
        return self.verdict in _UNEXPLAINED

    def __str__(self) -> str:
        place = f" in {self.module}" if self.module else ""
        at = f" ({located(self.location)})" if self.location else ""
        return f"{_called(self)}{place}{at}"

    __repr__ = brief


@dataclass(frozen=True, repr=False)
class RunDiff(Written):
    """The difference of two runs, call by call. Printing it shows the first call that nothing explains.

    Attributes:
        rows: A row per call, then per gradient, step by step, in the order of computation.
        a: The first run's torch, machine, device, threads, processes and number of steps.
        b: The same of the second run.

    Example:
        >>> with hmpx.trace("a.hmpx"):
        ...     y = torch.ones(4).softmax(0)
        >>> hmpx.diff_runs("a.hmpx", "a.hmpx").first is None
        True
    """

    rows: tuple[RunDiffRow, ...]
    a: Mapping[str, Any]
    b: Mapping[str, Any]

    @property
    def first(self) -> RunDiffRow | None:
        """The first row that nothing explains; None if everything is explained."""
        return next((row for row in self.rows if row.is_unexplained), None)

    @property
    def counts(self) -> dict[str, int]:
        """Verdict -> number of rows."""
        found = [row.verdict for row in self.rows]
        return {each: found.count(each) for each in VERDICTS if each in found}

    def by_module(self) -> ReportTable:
        """Returns a table of the modules in their order: calls, largest difference, verdicts."""
        return _modules(self._groups())

    def _groups(self) -> dict[str, list[RunDiffRow]]:
        groups: dict[str, list[RunDiffRow]] = {}
        for row in self.rows:
            groups.setdefault(row.module, []).append(row)
        return groups

    __repr__ = brief

    def __str__(self) -> str:
        parts = [*_verdict(self)]
        groups = {
            name: rows
            for name, rows in self._groups().items()
            if any(row.verdict not in ("equal", "not compared") for row in rows)
        }
        order = sorted(groups, key=lambda name: not any(row.is_unexplained for row in groups[name]))
        if order:
            parts += ["", str(_modules({name: groups[name] for name in order[:_MOST_MODULES]}))]
        if len(order) > _MOST_MODULES:
            parts.append(f"... and {len(order) - _MOST_MODULES} modules more; .by_module() has all")
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        return f"<div>{paragraphs(_verdict(self))}{self.by_module().to_html()}</div>"

    def _data(self) -> Mapping[str, Any]:
        return {"hmpx_run_diff": 2, **asdict(self)}

    def _table(self) -> ReportTable:
        return ReportTable.of_fields([each.name for each in fields(RunDiffRow)], self.rows, " and ")

    def _page(self) -> str:
        parts = [
            paragraphs(_verdict(self), "verdict"),
            chart_section("depth", "Differences along the run", _KEYS, _by_depth(self.rows)),
            table_section("modules", "Modules, in their order"),
            table_section("calls", "Calls and gradients, in the order of computation"),
        ]
        about = {
            f"{name} of {run}": str(each)
            for run, header in (("a", self.a), ("b", self.b))
            for name, each in header.items()
        }
        tables = {"modules": self.by_module(), "calls": _calls(self.rows)}
        return page("hmpx diff-runs", "Two runs compared", "\n".join(parts), about, tables=tables)


def _called(row: RunDiffRow) -> str:
    return f"gradient of {row.op}" if row.phase == "backward" else row.op


_KEYS: Final = {"own": "unexplained", "passed": "rounding, or inherited"}


def _by_depth(rows: Sequence[RunDiffRow]) -> str:
    points = [
        ("own" if row.is_unexplained else "passed", index, row.error, clean(str(row)))
        for index, row in enumerate(rows)
    ]
    # The explained ones first, below the others.
    points.sort(key=lambda each: each[0], reverse=True)
    return by_depth(points, len(rows), {}, "differences in the order of computation")


#: Most modules printed.
_MOST_MODULES: Final = 15


def _calls(rows: Sequence[RunDiffRow]) -> ReportTable:
    columns = [
        Column("call", range(len(rows))),
        Column("op", [*map(_called, rows)], clean, False, least=10),
        Column("module", [row.module for row in rows], clean, False, without_start, 12),
        Column("line", [row.location for row in rows], located, False),
        Column("in a", [short_dtype(row.types[0]) for row in rows], str, False),
        Column("in b", [short_dtype(row.types[1]) for row in rows], str, False),
        Column("verdict", [row.verdict for row in rows], str, False),
        Column("cause", [row.cause for row in rows], clean, False),
        Column("difference", [row.error for row in rows], _figure),
        Column("+-", [row.uncertainty for row in rows], _figure),
        Column("explained", [row.explained for row in rows], exponential),
    ]
    return ReportTable(columns)


def _figure(value: float) -> str:
    return "" if math.isnan(value) else exponential(value)


def _modules(groups: Mapping[str, Sequence[RunDiffRow]]) -> ReportTable:
    worst = []
    for rows in groups.values():
        found = {row.verdict for row in rows}
        order = (*_UNEXPLAINED, "inherited", "rounding", "not compared", "equal")
        worst.append(next(each for each in order if each in found))
    rel = [
        max((row.error for row in rows if not math.isnan(row.error)), default=math.nan)
        for rows in groups.values()
    ]
    return ReportTable(
        [
            Column("module", [name or "-" for name in groups], clean, False, without_start, 12),
            Column("verdict", worst, str, False),
            Column("rows", [*map(len, groups.values())], count),
            Column("largest difference", rel, _figure),
        ]
    )


def _verdict(diff: RunDiff) -> list[str]:
    """Returns the first row that nothing explains, the counts, and how the runs' machines differ."""
    if not diff.rows:
        return ["No call is in both traces."]
    first, parts = diff.first, []
    if first is None:
        equal = diff.counts.get("equal", 0) == len(diff.rows)
        parts.append("The runs are equal, bit by bit." if equal else "Nothing is unexplained.")
    else:
        said = first.cause or first.verdict
        if first.verdict == "unexplained" and math.isfinite(first.error):
            said = (
                f"differs by {exponential(first.error)} +- {exponential(first.uncertainty)}: {said}"
            )
        parts.append(f"first unexplained: {clean(str(first))}, step {first.step}: {clean(said)}")
        parts += [
            f"  {name}: {clean(decision)}"
            for name, decision in zip("ab", first.decisions, strict=True)
            if decision
        ]
    other = next((row for row in diff.rows if row.verdict == "not compared" and row.cause), None)
    if other is not None:
        parts.append(
            f"first not compared: {clean(str(other))}, step {other.step}: {clean(other.cause)}"
        )
    parts.append(
        f"{count(len(diff.rows))} results and gradients: "
        + ", ".join(f"{count(number)} {verdict}" for verdict, number in diff.counts.items())
    )
    others = [
        f"{name} {diff.a[name]} and {diff.b[name]}"
        for name in diff.a
        if name in diff.b and name not in ("hmpx", "format") and diff.a[name] != diff.b[name]
    ]
    if others:
        parts.append(f"the runs have different {', '.join(others)}")
    return parts
