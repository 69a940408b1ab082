"""What a picture shows, as data: ops, casts, parameters, and the tensors that pass between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

#: What a node is: an op; a cast or a rounding; a leaf of the graph, named or not; a tensor that was
#: given to be drawn; all that is beyond ``max_nodes``; or, in pictures only, modules like one before them.
Kind = Literal["op", "cast", "parameter", "input", "output", "cut", "fold"]

LEAVES: Final = frozenset({"parameter", "input"})


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that autograd keeps for the backward.

    Attributes:
        dtype: Its dtype: ``"bf16"``.
        shape: Its shape; None if unknown.
        bytes: The bytes that its elements take, whether other nodes keep the same memory or not.
    """

    dtype: str
    shape: tuple[int, ...] | None
    bytes: int


@dataclass(frozen=True, slots=True)
class Node:
    """Something in the picture.

    Attributes:
        id: Its name in DOT.
        kind: ``"op"``, ``"cast"``, ``"parameter"``, ``"input"``, ``"output"`` or ``"cut"``.
        label: ``"linear"``, ``"fp32 -> bf16"``, ``"fc.weight"``.
        dtype: The type that an op computes in, that a cast makes, or that a tensor has: ``"bf16"``,
            ``"float8_e4m3fn"``; ``""`` if unknown.
        shape: Of the result; None if unknown.
        module: Qualified name of the module that it belongs to; ``""`` for none.
        location: ``"train.py:12"``, of an op that was observed.
        reason: Why it computes in that type: ``"lists/hmpx/bf16.txt:18"``, of an op that was observed.
        grad_fn: Autograd's names of what is shown as this node.
        is_legalized: An op computes in fp32 and rounds to ``dtype``.
        times: How many such ops, one after the other, are shown as this one.
        saved: What it keeps for the backward; nothing once that has run.
    """

    id: str
    kind: Kind
    label: str
    dtype: str = ""
    shape: tuple[int, ...] | None = None
    module: str = ""
    location: str = ""
    reason: str = ""
    grad_fn: tuple[str, ...] = ()
    is_legalized: bool = False
    times: int = 1
    saved: tuple[Saved, ...] = ()


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor that passes from one node to another.

    Attributes:
        source: ``id`` of the node that made it.
        target: ``id`` of the node that takes it.
        dtype: Its dtype: ``"bf16"``; ``""`` if unknown.
        shape: Its shape; None if unknown.
    """

    source: str
    target: str
    dtype: str = ""
    shape: tuple[int, ...] | None = None
