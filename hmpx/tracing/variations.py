"""Results of `invariance`: the calls whose bits depend on the batch, on threads or on the run."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from ..errors import brief, lined
from ..places import located
from ..reports import ReportTable, Written, page, paragraphs, table_section

_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """Differing values of two tensors of one shape."""

    count: int
    total: int
    ulps: (
        int  # the largest distance in units in the last place; 0 for integers and non-finite values
    )

    def __str__(self) -> str:
        steps = f", up to {self.ulps:,} ulp" if self.ulps else ""
        return f"{self.count:,} of {self.total:,} values{steps}"


def difference(a: Sequence[Tensor], b: Sequence[Tensor]) -> Difference | None:
    """Returns the differences between the results of two calls; None if they have equal values."""
    count = total = ulps = 0
    for left, right in zip(a, b, strict=True):
        if left.shape != right.shape or left.dtype is not right.dtype:
            return Difference(left.numel(), left.numel(), 0)
        differ = ~((left == right) | ((left != left) & (right != right)))  # noqa: PLR0124  # NaN
        count, total = count + int(differ.sum()), total + left.numel()
        if differ.any() and left.is_floating_point():
            ulps = max(ulps, _ulps(left[differ], right[differ]))
    return Difference(count, total, ulps) if count else None


def _ulps(a: Tensor, b: Tensor) -> int:
    is_finite = a.isfinite() & b.isfinite()
    places = []
    for each in (a[is_finite], b[is_finite]):
        bits = each.view(_INTEGERS[each.element_size()])
        least = torch.iinfo(bits.dtype).min
        places.append(torch.where(bits < 0, least - bits.to(torch.int64), bits.to(torch.int64)))
    return int((places[0] - places[1]).abs().max()) if places[0].numel() else 0


@dataclass(frozen=True)
class Variation:
    """A call whose result depends on the batch, on the number of threads, or on the run.

    Attributes:
        op: Op name.
        module: Qualified name of the innermost module; ``""`` outside of modules.
        location: ``"model.py:31"``.
        found: What differs, of the first such call at this place: ``"alone"``, ``"permuted"``,
            ``"padded"``, ``"threads"`` or ``"repeated"`` -> a sentence.
        by_definition: Why other batches give another result, whatever the arithmetic; ``""`` for rounding.
        remedies: Line options that were tried, and ``"row by row"`` -> the time with them, in
            multiples of the call's own; NaN if the result still differs.
        is_low: Whether the call is in the low list.
        calls: Number of such calls.

    Example:
        >>> variation = hmpx.Variation("mm", "", "model.py:31", {"alone": "row 3 differs when alone"})
        >>> variation.says
        'row 3 differs when alone'
    """

    op: str
    module: str
    location: str
    found: Mapping[str, str]
    by_definition: str = ""
    remedies: Mapping[str, float] | None = None
    is_low: bool = False
    calls: int = 1

    @property
    def says(self) -> str:
        """The first difference, or why the result depends on the batch by definition."""
        return self.by_definition or next(iter(self.found.values()))

    @property
    def remedy(self) -> str:
        """The cheapest line option that removes the differences, or ``"row by row"``; ``""`` if none does."""
        removing = {name: cost for name, cost in (self.remedies or {}).items() if cost == cost}  # noqa: PLR0124
        lines = {name: cost for name, cost in removing.items() if name != BY_ROW}
        return min(lines or removing, key=removing.__getitem__, default="")


#: Each row in a call of its own.
BY_ROW: Final = "row by row"


@dataclass(frozen=True, repr=False)
class Invariance(Written):
    """A report of `invariance`. Printed, it is a verdict and a table, in the order of the calls.

    Attributes:
        variations: Places whose results differ by rounding, in the order of their first such call.
        by_definition: Places whose results depend on the batch by definition.
        skipped: Why calls were not repeated with other batches -> how many.
        calls: Number of calls.
        is_converted: Whether torch was converted.
        about: See [results](#results).

    Example:
        >>> model = torch.nn.Linear(4, 2, dtype=torch.float64)
        >>> hmpx.invariance(model, torch.zeros(3, 4, dtype=torch.float64)).first is None
        True
    """

    variations: tuple[Variation, ...]
    by_definition: tuple[Variation, ...]
    skipped: Mapping[str, int]
    calls: int
    is_converted: bool = False
    about: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def first(self) -> Variation | None:
        """The first place whose result differs by rounding; None if there is none."""
        return next(iter(self.variations), None)

    @property
    def policy(self) -> dict[str, Any]:
        """A policy with the remedies that are list lines; all other ops stay as they are.

        Of a converted program it has the lines only, to be added to its own policy.
        """
        found: dict[str, Any] = {} if self.is_converted else {"lists": "none"}
        for each in self.variations:
            if each.remedy and each.remedy != BY_ROW:
                key = "fp32" if each.remedy == "fp32" or not each.is_low else "low"
                line = each.op if each.remedy == "fp32" else f"{each.op} {each.remedy}"
                if line not in found.setdefault(key, []):
                    found[key].append(line)
        return found

    @property
    def table(self) -> ReportTable:
        """The places as rows: op, module, line, calls, what differs, remedy and its cost in time."""
        rows: list[tuple[Any, ...]] = []
        for each in (*self.variations, *self.by_definition):
            cost = (each.remedies or {}).get(each.remedy)
            remedy = "" if cost is None else f"{each.remedy}, {cost:.2g}x"
            place = each.op, each.module, located(each.location), each.calls
            rows.append((*place, each.says, remedy))
        titles = ("op", "module", "line", "calls", "differs", "remedy")
        return ReportTable.of(titles, rows, numbers=["calls"])

    def _data(self) -> Mapping[str, Any]:
        return {"hmpx_invariance": 1, **asdict(self)}

    def _table(self) -> ReportTable:
        return self.table

    def _page(self) -> str:
        note = (
            "Differs: what changed when the call ran again with other batches, on other threads or twice. Remedy: "
            "what removes the difference, and the call's time with it, in multiples of its own."
        )
        parts = [
            paragraphs(self._verdict(), "verdict"),
            table_section("calls", "Calls that differ, in their order", paragraphs([note], "note")),
        ]
        return page(
            "hmpx invariance",
            "Calls whose bits depend on the batch, on threads or on the run",
            "\n".join(parts),
            self.about,
            tables={"calls": self.table},
        )

    __repr__ = brief

    def __str__(self) -> str:
        table = self.table
        return lined([*self._verdict(), *(table.lines(sys.maxsize) if len(table) else [])])

    def _verdict(self) -> list[str]:
        lines = [f"{self.calls:,} calls repeated: none differs by rounding"]
        if self.first is not None:
            by_kind = Counter(kind for each in self.variations for kind in each.found)
            kinds = ", ".join(f"{kind} {count}" for kind, count in by_kind.items())
            inside = f" in {self.first.module}" if self.first.module else ""
            where = f"{self.first.op}{inside} ({located(self.first.location)})"
            lines = [
                f"{sum(each.calls for each in self.variations):,} of {self.calls:,} calls differ by "
                f"rounding, at {len(self.variations)} places ({kinds})",
                f"first: {where}: {self.first.says}",
            ]
        return lines + [
            f"not repeated with other batches: {n}, {why}" for why, n in self.skipped.items()
        ]
