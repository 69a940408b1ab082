"""The tree of the modules of a report, with sums over what is inside each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from .rows import Row, Totals, totals

#: Names of modules are split no further.
_DEEPEST: Final = 200


@dataclass(frozen=True)
class Node:
    """A module.

    Attributes:
        path: Its qualified name; ``""`` of the outermost module and what is outside of any.
        name: Its last part.
        parent: Where its parent is in the list; -1 of the first node.
        totals: Sums over its calls and those of all modules inside it.
    """

    path: str
    name: str
    parent: int
    totals: Totals


def module_tree(rows: Iterable[Row]) -> list[Node]:
    """Returns the modules, each after its parent; the first is the outermost."""
    by_module: dict[str, list[Row]] = {}
    for row in rows:
        by_module.setdefault(row.module, []).append(row)
    own = {path: totals(several) for path, several in by_module.items()}
    parts: dict[tuple[str, ...], Totals] = {(): totals(())}
    for path in sorted(own):
        split = tuple(path.split(".", _DEEPEST)) if path else ()
        for end in range(len(split) + 1):
            known = parts.get(split[:end])
            parts[split[:end]] = own[path] if known is None else _sum(known, own[path])
    places = {split: index for index, split in enumerate(parts)}
    return [
        Node(".".join(split), split[-1] if split else "", places[split[:-1]] if split else -1, sums)
        for split, sums in parts.items()
    ]


def _sum(a: Totals, b: Totals) -> Totals:
    counts = map(sum, zip(a[:-1], b[:-1], strict=True))
    timed = [each.seconds for each in (a, b) if each.seconds is not None]
    return Totals._make([*counts, sum(timed) if timed else None])
