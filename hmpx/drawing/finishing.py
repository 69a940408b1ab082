"""Makes nodes and edges of groups: long chains are folded, and what is too far away is left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from torch import Tensor

from ..compute import saved_by
from ..torch_internals import TELLS_SAVED
from .building import Builder, short
from .graph import Edge, Node, Saved
from .groups import Group
from .modules import outputs_first
from .walking import Step

#: That many ops of a kind, one after the other, and more are drawn as one.
_MANY: Final = 4


def fold(groups: list[Group]) -> dict[int, int]:
    """Makes one group of long chains of one op, and of round trips of casts that were not observed.

    Returns:
        Position of a group -> that of the one that is drawn for it.
    """
    consumers: dict[int, set[int]] = {}
    for position, group in enumerate(groups):
        for source, _, _ in group.inputs:
            consumers.setdefault(source, set()).add(position)
    return {**_round_trips(groups, consumers), **_chains(groups, consumers)}


def _round_trips(groups: list[Group], consumers: dict[int, set[int]]) -> dict[int, int]:
    folded: dict[int, int] = {}
    for position, group in enumerate(groups):
        if group.kind != "cast" or group.call is not None or position in folded:
            continue
        source = group.inputs[0][0] if group.inputs else position
        first = groups[source]
        is_free = first.kind == "cast" and first.call is None and consumers[source] == {position}
        if is_free and first.label.split(" -> ")[0] == group.dtype:
            group.label = f"{first.label} -> {group.dtype}"
            group.inputs = first.inputs
            group.steps = [*group.steps, *first.steps]
            folded[source] = position
    return folded


def _chains(groups: list[Group], consumers: dict[int, set[int]]) -> dict[int, int]:
    first: dict[int, int] = {}
    for position, group in enumerate(groups):
        if position in first or group.kind != "op":
            continue
        chain, at = [position], position
        while True:
            sources = {source for source, _, _ in groups[at].inputs}
            if len(sources) != 1:
                break
            (at,) = sources
            other = groups[at]
            is_alike = (other.kind, other.label, other.dtype, other.module) == (
                group.kind,
                group.label,
                group.dtype,
                group.module,
            )
            if not is_alike or len(consumers[at]) != 1:
                break
            chain.append(at)
        if len(chain) >= _MANY:
            first.update(dict.fromkeys(chain, position))
            group.times = len(chain)
            group.steps = [at for each in chain for at in groups[each].steps]
            group.inputs = groups[chain[-1]].inputs
    return {position: shown for position, shown in first.items() if position != shown}


def finished(
    builder: Builder,
    outputs: Iterable[tuple[str, Tensor, int]],
    max_nodes: int,
) -> tuple[tuple[Node, ...], tuple[Edge, ...], int]:
    """Returns nodes and edges from the inputs to the outputs, and how many nodes were left out.

    Args:
        builder: After `Builder.build`.
        outputs: Where each drawn tensor is in what was given, the tensor, and its step's position.
        max_nodes: How many nodes to draw at most; those nearest to the outputs.
    """
    groups, steps, emulated = builder.groups, builder.steps, builder.formats()
    folded = fold(groups)

    def shown(position: int) -> int:
        return folded.get(position, position)

    ends = [(place, tensor, shown(builder.group_of(at))) for place, tensor, at in outputs]
    # Nearest first; what only folded groups lead to has been given to the one that is drawn.
    order = list(dict.fromkeys(position for _, _, position in ends))
    known = set(order)
    done = 0
    while done < len(order):
        for source, _, _ in groups[order[done]].inputs:
            if shown(source) not in known:
                known.add(shown(source))
                order.append(shown(source))
        done += 1
    drawn, left_out = set(order[:max_nodes]), max(0, len(order) - max_nodes)
    nodes: list[Node] = []
    edges: dict[Edge, None] = {}
    open_groups = {p for p in drawn if any(steps[at].is_open for at in groups[p].steps)}
    is_whole = not any(step.is_open for step in steps)
    if left_out or not is_whole:
        left_out = max(left_out, 1)
        least = "" if is_whole else "at least "
        said = f"{least}{left_out:,} more nodes; max_nodes={max_nodes:,}"
        nodes.append(Node("cut", "cut", said))
    in_order = [position for position in reversed(outputs_first(groups)) if position in drawn]
    for position in dict.fromkeys([*in_order, *reversed(order[:max_nodes])]):
        group = groups[position]
        nodes.append(_node(position, group, steps))
        if position in open_groups:
            edges[Edge("cut", f"n{position}")] = None
        for source, made, output in group.inputs:
            dtype, shape = steps[made].output(output)
            named = groups[source].dtype if groups[source].dtype in emulated else short(dtype)
            at = f"n{shown(source)}" if shown(source) in drawn else "cut"
            edges[Edge(at, f"n{position}", named, shape)] = None
    for count, (place, tensor, position) in enumerate(ends):
        shape = tuple(tensor.shape) if not tensor.is_nested else None
        dtype_name = short(tensor.dtype)
        nodes.append(Node(f"out{count}", "output", f"output{place}", dtype_name, shape))
        at = f"n{position}" if position in drawn else "cut"
        edges[Edge(at, f"out{count}", dtype_name, shape)] = None
    return tuple(nodes), tuple(edges), left_out


#: Of the names of autograd's nodes that are one node.
_MOST_NAMES: Final = 20


def _node(position: int, group: Group, steps: list[Step]) -> Node:
    call = group.call
    own = [steps[at] for at in group.steps]
    result = own[0] if group.result is None else steps[group.result]
    return Node(
        id=f"n{position}",
        kind=group.kind,
        label=group.label,
        dtype=group.dtype,
        shape=result.output()[1],
        module=group.module or "",
        location="" if call is None else call.location,
        reason="" if call is None else call.reason,
        grad_fn=tuple([step.name for step in own[:_MOST_NAMES]]),
        is_legalized=group.is_legalized,
        times=group.times,
        saved=tuple([saved for step in own for saved in _saved(step)]),
    )


def _saved(step: Step) -> Iterator[Saved]:
    """Yields what autograd keeps for a step; what the program's hooks have packed is not known."""
    if step.leaf is not None or not TELLS_SAVED:
        return
    for each in saved_by(step.node):
        tensor = each.data
        if isinstance(tensor, Tensor):
            shape = None if tensor.is_nested else tuple([int(size) for size in tensor.shape])
            yield Saved(short(tensor.dtype), shape, tensor.numel() * tensor.itemsize)
