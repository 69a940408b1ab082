"""The data of a picture: ops, casts, parameters, and the tensors between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from ..errors import fielded

#: The kinds of nodes: an op; a cast or a rounding; a named leaf of the graph, or another leaf; a tensor
#: given by the user; everything beyond ``max_nodes``; or, only in pictures, modules similar to the one before.
Kind = Literal["op", "cast", "parameter", "input", "output", "cut", "fold"]

LEAVES: Final = frozenset({"parameter", "input"})


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that autograd keeps for the backward.

    Attributes:
        dtype: Its dtype: ``"bf16"``.
        shape: Its shape; None if unknown.
        bytes: The bytes of its elements, even if other nodes keep the same memory.
    """

    dtype: str
    shape: tuple[int, ...] | None
    bytes: int


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the picture.

    Attributes:
        id: Its name in DOT.
        kind: ``"op"``, ``"cast"``, ``"parameter"``, ``"input"``, ``"output"`` or ``"cut"``.
        label: ``"linear"``, ``"fp32 -> bf16"``, ``"fc.weight"``.
        dtype: The type in which an op computes, or of a cast's result or a tensor: ``"bf16"``,
            ``"float8_e4m3fn"``; ``""`` if unknown.
        shape: Shape of the result; None if unknown.
        module: Qualified name of its module; ``""`` for none.
        location: ``"train.py:12"``, for an observed op.
        reason: Why it computes in that type: ``"lists/hmpx/bf16.txt:18"``, for an observed op.
        grad_fn: Autograd's names for this node.
        is_legalized: Whether an op computes in fp32 and rounds to ``dtype``.
        saved: The tensors it keeps for the backward; none once that has run.
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
    saved: tuple[Saved, ...] = ()

    __repr__ = fielded


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor that goes from one node to another.

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
