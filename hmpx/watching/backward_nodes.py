"""The autograd nodes of one call: from those of its results to those of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

#: More nodes than any op has: beyond them, inputs were not recognised.
_MOST: Final = 200


def boundary(entries: Sequence[Any], stops: Sequence[Any]) -> dict[Any, Sequence[int]]:
    """Returns node -> its edges that leave the call, to nodes in ``stops`` and to leaves.

    Args:
        entries: Nodes of the results.
        stops: Nodes of the inputs; the caller keeps them, or Python would make other objects for them.
    """
    seen, pending = set(entries), list(entries)
    exits: dict[Any, Sequence[int]] = {}
    while pending:
        node = pending.pop()
        for edge, (following, _) in enumerate(node.next_functions):
            if following is None:
                continue
            if following in stops or type(following).__name__ == "AccumulateGrad":
                exits[node] = [*exits.get(node, ()), edge]
            elif following not in seen:
                seen.add(following)
                pending.append(following)
        if len(seen) > _MOST:
            return {node: range(len(node.next_functions)) for node in entries}
    return exits


def name_of(node: Any) -> str:
    """Returns a node's name: ``"MulBackward0"``."""
    return str(node.name()).rpartition("::")[2]
