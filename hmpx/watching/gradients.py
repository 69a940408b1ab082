"""Hooks on the autograd nodes of a watched call, where gradients enter and leave its backward."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from ..tensors import edges_of, node_of
from .records import CallRecord, Cell, GradientRecord, is_off_limits
from .trials import Arguments

if TYPE_CHECKING:
    from .notes import Notes

#: More nodes than any op has: with more, inputs were not recognised.
MOST: Final = 200

#: node -> its edges that leave a call.
_Exits = Mapping[Any, Sequence[int]]


class Hooks:
    """The hooks on the nodes of one call, with the same lifetime.

    They keep the call's arguments, if its backward may be tried, until the backward has run.
    """

    __slots__ = ("_arguments", "_arrived", "_gradients", "_left", "_name", "_notes", "_record")

    def __init__(
        self, notes: Notes, record: CallRecord, name: str, arguments: Arguments | None
    ) -> None:
        self._notes, self._record, self._name = notes, record, name
        self._arguments, self._left = arguments, 0
        self._arrived: list[Cell] = []
        self._gradients: dict[int, Tensor] = {}

    def on_nodes(self, entries: Mapping[Any, Mapping[int, int]], exits: _Exits) -> None:
        """Hooks the results' nodes (number of a gradient -> of a result), and where inputs' gradients leave."""
        self._left = len(exits)
        for node, numbers in entries.items():
            if node not in exits:
                node.register_prehook(functools.partial(self._arrive, numbers))
        for node, edges in exits.items():
            node.register_hook(functools.partial(self._pass_on, edges, entries.get(node)))

    def _arrive(self, numbers: Mapping[int, int], grad_outputs: Sequence[Tensor | None]) -> None:
        if not self._is_closed():
            self._take(numbers, grad_outputs)
            self._add([])

    def _pass_on(
        self,
        edges: Sequence[int],
        numbers: Mapping[int, int] | None,
        grad_inputs: Sequence[Tensor | None],
        grad_outputs: Sequence[Tensor | None],
    ) -> None:
        """Records the gradients of inputs, and those of results if no other node gets them first."""
        if self._is_closed():
            return
        if numbers is not None:
            self._take(numbers, grad_outputs)
        self._add(self._notes.gradients([grad_inputs[e] for e in edges if e < len(grad_inputs)]))
        self._left -= 1
        if not self._left:
            self._release()

    def _is_closed(self) -> bool:
        if self._notes.is_open and not is_off_limits():
            return False
        self._release()
        return True

    def _release(self) -> None:
        self._arguments, self._gradients = None, {}

    def _take(self, numbers: Mapping[int, int], gradients: Sequence[Tensor | None]) -> None:
        self._arrived = self._notes.gradients(gradients)
        if self._arguments is not None:
            for position, number in numbers.items():
                if (gradient := gradients[position]) is not None:
                    self._gradients[number] = gradient

    def _add(self, after: list[Cell]) -> None:
        notes, before = self._notes, self._arrived
        if before or after:
            record = GradientRecord(self._record, self._name, before, after)
            if self._arguments is not None:
                notes.try_backward(record, self._arguments, self._gradients)
            notes.add(record)


def hook_call(
    notes: Notes,
    record: CallRecord,
    inputs: Sequence[Tensor],
    results: Sequence[Tensor],
    arguments: Arguments | None,
) -> None:
    """Records gradients where they enter and leave the backward of a call."""
    nodes: dict[Any, dict[int, int]] = {}
    for number, each in enumerate(results):
        if (node := node_of(each)) is not None:
            nodes.setdefault(node, {})[each.output_nr] = number
    if not nodes:
        return
    stops = {node for each in inputs if (node := node_of(each)) is not None}
    if any([each is result for result in results for each in inputs]):  # noqa: C419
        # It was written to, or returned as it is: its earlier node is unknown.
        entries = list(nodes) if record.writes else []
        exits: _Exits = {node: range(len(edges_of(node))) for node in entries}
    else:
        entries = [node for node in nodes if node not in stops]
        exits = boundary(entries, stops)
    Hooks(notes, record, "", arguments).on_nodes({each: nodes[each] for each in entries}, exits)


def hook_function(notes: Notes, record: CallRecord, node: Any) -> None:
    """Records gradients at the node of a function that is not an observed call."""
    Hooks(notes, record, name_of(node), None).on_nodes(
        {node: {}}, {node: range(len(edges_of(node)))}
    )


def boundary(entries: Sequence[Any], stops: Container[Any]) -> _Exits:
    """Returns node -> its edges that leave the call, to nodes in ``stops`` and to leaves.

    ``stops`` are nodes of inputs, which the caller holds.
    """
    seen, pending = set(entries), list(entries)
    exits: dict[Any, list[int]] = {}
    while pending:
        node = pending.pop()
        for edge, (following, _) in enumerate(edges_of(node)):
            if following is None:
                continue
            if _is_leaf(following) or following in stops:
                exits.setdefault(node, []).append(edge)
            elif following not in seen:
                seen.add(following)
                pending.append(following)
        if len(seen) > MOST:
            return {node: range(len(edges_of(node))) for node in entries}
    return exits


def sources_of(
    nodes: Iterable[Any],
    is_known: Callable[[Any], bool] = lambda node: False,
    most: float = math.inf,
) -> list[tuple[Any, int]]:
    """Returns the edges from the graph behind ``nodes`` to known nodes and to leaves."""
    pending = list(nodes)
    found, seen = [], set(pending)
    while pending and len(seen) <= most:
        for edge in edges_of(pending.pop()):
            following = edge[0]
            if following is None:
                continue
            if is_known(following) or _is_leaf(following):
                found.append(edge)
            elif following not in seen:
                seen.add(following)
                pending.append(following)
    return found


def _is_leaf(node: Any) -> bool:
    return type(node).__name__ == "AccumulateGrad"


def name_of(node: Any) -> str:
    """Returns a node's name: ``"MulBackward0"``."""
    return str(node.name()).rpartition("::")[2]
