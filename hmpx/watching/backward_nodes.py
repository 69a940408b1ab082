"""The autograd nodes of one call: from those of its results to those of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from ..tensors import edges_of

#: More nodes than any op has: beyond them, inputs were not recognised.
_MOST: Final = 200


#: Nodes whose result has the values that they are given: in another shape, or cast. With a cast to a
#: narrower dtype that is another matter: it may overflow.
HANDING_ON: Final = frozenset(
    {
        "PermuteBackward0", "ReshapeAliasBackward0", "SqueezeBackward0", "SqueezeBackward1",
        "TBackward0", "ToCopyBackward0", "TransposeBackward0", "UnsafeViewBackward0",
        "UnsqueezeBackward0", "ViewBackward0",
    }
)  # fmt: skip

#: node -> its edges that leave a call.
Exits = Mapping[Any, Sequence[int]]


def boundary(
    entries: Sequence[Any], stops: Mapping[Any, torch.dtype | None], widest: torch.dtype
) -> Exits:
    """Returns node -> its edges that leave the call, to nodes in ``stops`` and to leaves.

    Where only nodes that hand on gradients come between an input and the node that computes its gradient,
    the edge is the latter's: what reaches the input is finite exactly if that is.

    Args:
        entries: Nodes of the results.
        stops: Node of an input -> its dtype, None if there are several. The caller keeps the nodes, or
            Python would make other objects for them.
        widest: The widest dtype that the call computes in: casts to inputs of it are to no narrower one.
    """
    seen, pending = set(entries), list(entries)
    exits: dict[Any, list[int]] = {}
    leaving: list[tuple[Any, int]] = []  # to inputs of the widest dtype
    above: dict[Any, tuple[Any, int] | None] = {}
    while pending:
        node = pending.pop()
        for edge, (following, _) in enumerate(edges_of(node)):
            if following is None:
                continue
            is_leaf = type(following).__name__ == "AccumulateGrad"
            if is_leaf or following in stops:
                dtype = following.variable.dtype if is_leaf else stops[following]
                if dtype is widest:
                    leaving.append((node, edge))
                else:
                    exits.setdefault(node, []).append(edge)
            elif following not in seen:
                seen.add(following)
                above[following] = node, edge
                pending.append(following)
            else:
                above[following] = None  # its gradient is a sum
        if len(seen) > _MOST:
            return {node: range(len(edges_of(node))) for node in entries}
    for last in leaving:
        source, number = _computing(*last, above)
        exits.setdefault(source, []).append(number)
    return exits


def _computing(
    node: Any, edge: int, above: Mapping[Any, tuple[Any, int] | None]
) -> tuple[Any, int]:
    """Returns the node, and its edge, whose result the nodes from there on hand on.

    The last cast on the way to an input of the widest dtype widens; one before it may narrow and overflow.
    """
    is_cast = False
    while (name := type(node).__name__) in HANDING_ON and (source := above.get(node)) is not None:
        if name == "ToCopyBackward0":
            if is_cast:
                break
            is_cast = True
        node, edge = source
    return node, edge


def leaving(node: Any, is_known: Callable[[Any], bool]) -> list[tuple[Any, int]]:
    """Returns the edges by which the graph behind ``node`` reaches nodes that are known, and leaves."""
    found, seen, pending = [], {node}, [node]
    while pending and len(seen) <= _MOST:
        for edge in edges_of(pending.pop()):
            following = edge[0]
            if following is None:
                continue
            if is_known(following) or type(following).__name__ == "AccumulateGrad":
                found.append(edge)
            elif following not in seen:
                seen.add(following)
                pending.append(following)
    return found


def name_of(node: Any) -> str:
    """Returns a node's name: ``"MulBackward0"``."""
    return str(node.name()).rpartition("::")[2]
