"""Groups of rows with something in common, and their table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..errors import fielded
from . import cells
from .cells import clean
from .rows import Row, Totals, totals
from .table import Column, ReportTable

#: Phases as tables show them.
_PHASES: Final = {"forward": "", "backward": "bwd", "recompute": "redo"}


#: Field that groups share -> its title in tables, its formatter, how it is cut, its minimum width.
_NAMES: Final[dict[str, tuple[str, Callable[[str], str], Any, int]]] = {
    "op": ("op", lambda name: clean(name) or cells.NOTHING, cells.without_end, 10),
    "phase": ("phase", lambda phase: _PHASES.get(phase, clean(phase)), cells.without_end, 4),
    "input_dtypes": ("from", lambda names: cells.dtypes(names.split(", ")), cells.without_end, 9),
    "dtype": ("in", lambda names: cells.dtypes(names.split(", ")), cells.without_end, 4),
    "output_dtypes": ("to", lambda names: cells.dtypes(names.split(", ")), cells.without_end, 9),
    "module": ("module", lambda name: clean(name) or "(outermost)", cells.without_start, 12),
    "location": (
        "location",
        lambda line: cells.located(line) or cells.NOTHING,
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
        rest = [f"... and {cells.count(more)} more; {call} has all"] if more > 0 else []
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
        (True, Column("calls", [each.calls for each in shown], cells.count)),
        ("dtype" not in names, Column("low", [*map(_low_share, shown)])),
        (has_casts, Column("casts", [each.casts for each in shown], cells.count)),
        (has_casts, Column("written", [each.cast_bytes for each in shown], cells.size)),
        (flops > 0, Column("FLOPs", [cells.share(each.flops, flops) for each in shown])),
        (bytes_ > 0, Column("bytes", [cells.share(each.bytes, bytes_) for each in shown])),
        (
            any(each.seconds is not None for each in every),
            Column("time", [each.seconds for each in shown], cells.duration),
        ),
    ]
    return [column for is_shown, column in found if is_shown]


def _low_share(sums: Totals) -> str:
    """Returns the low-precision share: of FLOPs, without any of bytes, or else of calls."""
    if sums.flops:
        return cells.share(sums.low_flops, sums.flops)
    if sums.bytes:
        return cells.share(sums.low_bytes, sums.bytes)
    return cells.share(sums.low_calls, sums.calls)
