"""Which module an op is in, told from the parameters around it, where no call of it was seen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .groups import Group


def derived_modules(groups: Sequence[Group]) -> None:
    """Gives each group a module: the one whose parameters it takes, else the one around its neighbours.

    Args:
        groups: The whole graph; parameters have their modules.
    """
    order = outputs_first(groups)
    own: list[str | None] = [None] * len(groups)
    for position in reversed(order):  # casts of parameters belong to the op that takes them
        taken = [source for source, _, _ in groups[position].inputs]
        parameters = [
            groups[source].module if groups[source].kind == "parameter" else own[source]
            for source in taken
            if groups[source].kind in ("parameter", "cast")
        ]
        own[position] = _around(parameters)
    before = _towards_inputs(groups, own, order)
    after = _towards_outputs(groups, own, order)
    for position, group in enumerate(groups):
        if group.kind != "parameter":
            found = own[position]
            group.module = _around([before[position], after[position]]) if found is None else found


def outputs_first(groups: Sequence[Group]) -> list[int]:
    """Returns the positions in an order in which each comes before those that it takes tensors of."""
    waits = [0] * len(groups)
    for group in groups:
        for source in {source for source, _, _ in group.inputs}:
            waits[source] += 1
    order = [position for position, count in enumerate(waits) if not count]
    done = 0
    while done < len(order):
        for source in {source for source, _, _ in groups[order[done]].inputs}:
            waits[source] -= 1
            if not waits[source]:
                order.append(source)
        done += 1
    return order


def _towards_inputs(
    groups: Sequence[Group], own: list[str | None], order: list[int]
) -> list[str | None]:
    """Returns the module around what each group takes."""
    found = list(own)
    for position in reversed(order):
        if found[position] is None:
            taken = [
                found[source]
                for source, _, _ in groups[position].inputs
                if groups[source].kind != "parameter"
            ]
            found[position] = _around(taken)
    return found


def _towards_outputs(
    groups: Sequence[Group], own: list[str | None], order: list[int]
) -> list[str | None]:
    """Returns the module around what takes each group's result."""
    takers: dict[int, list[str | None]] = {}
    found = list(own)
    for position in order:
        if found[position] is None:
            found[position] = _around(takers.get(position, [""]))
        for source, _, _ in groups[position].inputs:
            takers.setdefault(source, []).append(found[position])
    return found


def _around(paths: Iterable[str | None]) -> str | None:
    """Returns the innermost module that all these are in, of those that are known; None for none."""
    known = [path.split(".") if path else [] for path in paths if path is not None]
    if not known:
        return None
    common = []
    for parts in zip(*known, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)
