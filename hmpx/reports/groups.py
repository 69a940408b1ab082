"""Groups of rows that have something in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .rows import Group, Row, totals
from .tables import html_table, text_table


class Groups(list[Group]):
    """Groups of rows; printing them prints a table.

    Attributes:
        titles: What each part of a key is: ``("location", "op")``.

    Example:
        >>> from hmpx.reports import Report
        >>> print(Report(()).by_module())
        no calls
    """

    def __init__(self, groups: Iterable[Group] = (), titles: tuple[str, ...] = ()) -> None:
        super().__init__(groups)
        self.titles = titles

    def table(self, most: int | None = None) -> str:
        """Returns a table of the first ``most`` groups; shares are of them all."""
        return text_table(self, self.titles, most)

    def html_table(self, most: int | None = 100) -> str:
        """Returns the same as HTML, without scripts or styles."""
        return html_table(self, self.titles, most)

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return self.html_table()


def grouped(
    rows: Iterable[Row], key: Callable[[Row], tuple[str, ...]], titles: tuple[str, ...] = ()
) -> Groups:
    """Returns groups of the rows that have the same ``key``; those of most FLOPs, then bytes, first.

    Args:
        rows: The rows.
        key: Returns what a row has in common with others.
        titles: What each part of a key is, for tables.
    """
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    groups = [Group(name, totals(several), tuple(several)) for name, several in found.items()]
    groups.sort(key=lambda group: (-group.totals.flops, -group.totals.bytes))
    return Groups(groups, titles)
