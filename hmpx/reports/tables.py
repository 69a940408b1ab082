"""Tables of groups of rows: their columns, as plain text of 80 columns, and as HTML."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from .cells import (
    NOTHING,
    WIDTH,
    clean,
    count,
    dtypes,
    duration,
    located,
    padded,
    share,
    size,
    width,
    without_end,
    without_start,
)
from .rows import Group, Totals

#: The narrowest that a column of names gets.
_NARROWEST: Final = {"op": 10, "from": 9, "to": 9, "module": 12, "location": 16}

#: Phases as tables show them.
_PHASES: Final = {"forward": "", "backward": "bwd", "recompute": "redo"}


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: Its title.
        cells: What it shows, row by row.
        is_number: Whether its cells stand at its right edge.
        cut: Shortens a cell to some columns.
    """

    title: str
    cells: tuple[str, ...]
    is_number: bool = True
    cut: Callable[[str, int], str] = without_end

    @property
    def width(self) -> int:
        """The columns of a terminal that it takes."""
        return max(map(width, self.all))

    @property
    def all(self) -> tuple[str, ...]:
        """Its title and its cells."""
        return (self.title, *self.cells)


def columns(
    groups: Sequence[Group], titles: Sequence[str], most: int | None = None
) -> list[Column]:
    """Returns the columns of a table, without those that say nothing: of casts where there are none.

    Args:
        groups: The groups; shares are of the sum of them all.
        titles: What each part of their keys is.
        most: How many of the groups are shown.
    """
    all_sums = [group.totals for group in groups]
    shown = groups[:most]
    names = [_names(title, [group.key[i] for group in shown]) for i, title in enumerate(titles)]
    sums = [group.totals for group in shown]
    numbers = [("calls", True, [count(each.calls) for each in sums])]
    if "in" not in titles:
        numbers.append(("low", True, [low_share(each) for each in sums]))
    has_casts = any(each.casts for each in all_sums)
    flops = sum(each.flops for each in all_sums)
    bytes_ = sum(each.bytes for each in all_sums)
    numbers += [
        ("casts", has_casts, [count(each.casts) for each in sums]),
        ("written", has_casts, [size(each.cast_bytes) for each in sums]),
        ("FLOPs", flops > 0, [share(each.flops, flops) for each in sums]),
        ("bytes", bytes_ > 0, [share(each.bytes, bytes_) for each in sums]),
        (
            "time",
            any(each.seconds is not None for each in all_sums),
            [duration(each.seconds) for each in sums],
        ),
    ]
    kept = [Column(title, tuple(cells)) for title, is_kept, cells in numbers if is_kept]
    return [name for name in names if name.title != "phase" or any(name.cells)] + kept


def low_share(sums: Totals) -> str:
    """Returns the share in low precision: of FLOPs, of bytes where there are none, or of calls."""
    if sums.flops:
        return share(sums.low_flops, sums.flops)
    if sums.bytes:
        return share(sums.low_bytes, sums.bytes)
    return share(sums.low_calls, sums.calls)


def _names(title: str, names: Iterable[str]) -> Column:
    if title in ("from", "in", "to"):
        return Column(title, tuple([dtypes(each.split(", ")) for each in names]), is_number=False)
    if title == "phase":
        cells = tuple([_PHASES.get(each, clean(each)) for each in names])
        return Column(title, cells, is_number=False)
    is_path = title in ("module", "location")
    nothing = "(outermost)" if title == "module" else NOTHING
    show = located if title == "location" else clean
    cells = tuple([show(each) or nothing for each in names])
    return Column(title, cells, is_number=False, cut=without_start if is_path else without_end)


# --- text ----------------------------------------------------------------------------------------


def text_table(groups: Sequence[Group], titles: Sequence[str], most: int | None = None) -> str:
    """Returns a table of the first ``most`` groups as text, no wider than 80 columns."""
    if not groups:
        return "no calls"
    rows = table_rows(groups, titles, most)
    return "\n".join("".join(cells).rstrip() for cells in rows)


def table_rows(
    groups: Sequence[Group], titles: Sequence[str], most: int | None = None, line: int = WIDTH
) -> list[list[str]]:
    """Returns the lines of a table, its titles first, in cells that join to at most ``line`` columns."""
    return column_rows(columns(groups, titles, most), line)


def column_rows(found: Sequence[Column], line: int = WIDTH) -> list[list[str]]:
    """Returns the lines of a table with these columns, as `table_rows` does."""
    fitted, between = _fitted([*found], line)
    padded_cells = [
        [padded(cell, column.width, is_right=column.is_number) for cell in column.all]
        for column in fitted
    ]
    first, *rest = padded_cells
    spaced = [first, *([between + cell for cell in cells] for cells in rest)]
    return [list(cells) for cells in zip(*spaced, strict=True)]


def _fitted(found: list[Column], line: int) -> tuple[list[Column], str]:
    """Returns the columns, cut such that a line of them fits, and what stands between them."""
    for between in ("  ", " "):
        space = line - len(between) * (len(found) - 1)
        excess = sum(column.width for column in found) - space
        if excess <= 0 or between == " ":
            break
        roomy = sum(max(0, column.width - 24) for column in found if not column.is_number)
        if excess <= roomy:
            break
    while excess > 0:
        index, widest = max(
            ((i, column) for i, column in enumerate(found) if not column.is_number),
            key=lambda each: each[1].width - _NARROWEST.get(each[1].title, 4),
        )
        others = [c.width for i, c in enumerate(found) if i != index and not c.is_number]
        target = max(widest.width - excess, min(widest.width - 1, max(others, default=0)))
        cells = [widest.cut(cell, target) for cell in widest.cells]
        found = [*found]
        found[index] = replace(widest, title=without_end(widest.title, target), cells=tuple(cells))
        excess = sum(column.width for column in found) - space
    return found, between


# --- HTML ----------------------------------------------------------------------------------------


def html_table(groups: Sequence[Group], titles: Sequence[str], most: int | None = 100) -> str:
    """Returns a table of the first ``most`` groups as HTML, without scripts or styles."""
    if not groups:
        return "<p>no calls</p>"
    found = columns(groups, titles, most)
    head = "".join(f'<th scope="col">{html.escape(column.title)}</th>' for column in found)
    body = []
    for cells in zip(*(column.cells for column in found), strict=True):
        shown = [f"<td>{html.escape(cell)}</td>" for cell in cells]
        body.append(f"<tr>{''.join(shown)}</tr>")
    more = len(groups) - len(body)
    note = f"<p>... and {more:,} more</p>" if more else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>{note}"
