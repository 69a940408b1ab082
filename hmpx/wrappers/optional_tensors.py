"""Parts of a wrapper's source that put optional tensors, given by name, into their places."""

from __future__ import annotations

import textwrap

from ..casting import Recipe
from .templates import FILL, FILL_ONE, PLACED


def position_count(recipe: Recipe) -> int:
    """Returns the number of arguments that are looked at."""
    return max([*recipe.cast_kinds, *recipe.statistic_positions], default=-1) + 1


def placed(recipe: Recipe, names: str) -> str:
    """Returns the part that puts optional tensors at the end, given by name, into their places."""
    positions = _fillable(recipe)
    if not positions:
        return ""
    fills = textwrap.indent("\n".join(_fills(recipe, positions)), "    ")
    return PLACED.format(last=f"a{positions[-1]}", fills=fills, names=names)


def _fillable(recipe: Recipe) -> range:
    """Returns the positions of the optional tensors at the end; none if there is nothing else."""
    first = count = position_count(recipe)
    while first - 1 in recipe.site.parameters.fillable & recipe.cast_kinds.keys():
        first -= 1
    return range(first, count) if first else range(0)


def _fills(recipe: Recipe, positions: range) -> list[str]:
    names = recipe.site.parameters.names
    return [FILL_ONE.format(position=p, name=names[p]) for p in positions]


def filled(recipe: Recipe, settled: str) -> str:
    """Returns the part that puts optional tensors at the end into their places, and asks ``settled`` again."""
    positions = _fillable(recipe)
    if not positions:
        return ""
    first, count, kinds = positions.start, positions.stop, recipe.cast_kinds
    tests = [
        f"type(a{p}) in plain_tensors" if kinds.get(p) == "T" else f"a{p} is not missing"
        for p in range(first)
    ]
    return FILL.format(
        last=f"a{count - 1}",
        tests=" and ".join(tests),
        fills="\n".join(_fills(recipe, positions)),
        settled=textwrap.indent(settled, "    "),
    )
