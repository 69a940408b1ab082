"""The raw autograd graph: every node behind some tensors, found without recursion."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
from torch import Tensor

from .. import ops
from ..tensors import edges_of, node_of, short_name
from ..torch_internals import function_of, number_of, outputs_of

#: An output's dtype and shape, as far as known.
Output = tuple[torch.dtype | None, tuple[int, ...] | None]


@dataclass(slots=True, eq=False)
class Step:
    """One node of autograd's graph."""

    node: Any  # held, since the id is that of its Python object
    name: str  # autograd's: "AddmmBackward0"
    op: str  # ATen's or the function's name: "addmm"
    kind: Literal["leaf", "cast", "view", "op"]
    leaf: Tensor | None
    outputs: list[Output]
    inputs: list[tuple[int, int]] = field(default_factory=list)  # steps, and which output of each
    number: int | None = None  # greater for steps made later; None if unknown
    is_own: bool = False  # one of hmpx's own functions made it
    is_open: bool = False  # its inputs were not walked

    def output(self, position: int = 0) -> Output:
        """Returns the dtype and the shape of one output; None for unknown ones."""
        if self.leaf is not None:
            return self.leaf.dtype, tuple(self.leaf.shape)
        return self.outputs[position] if position < len(self.outputs) else (None, None)


def walk(tensors: Iterable[Tensor], most: int) -> tuple[list[Step], dict[int, int]]:
    """Returns the steps behind ``tensors``, and ``id`` of a node -> position of its step.

    Follows at most ``most`` steps; those nearest to the tensors come first.
    """
    steps: list[Step] = []
    positions: dict[int, int] = {}

    def position_of(node: Any) -> int:
        found = positions.get(id(node))
        if found is None:
            found = positions[id(node)] = len(steps)
            steps.append(_step(node))
        return found

    for tensor in tensors:
        position_of(node_of(tensor))
    for done, step in enumerate(steps):  # grows in the loop
        if done >= most:
            step.is_open = step.leaf is None
            continue
        for node, output in edges_of(step.node):
            if node is not None:
                step.inputs.append((position_of(node), output))
    for step in steps:
        if step.op == "to_copy" and step.inputs:  # it may also copy to another device
            position, output = step.inputs[0]
            before, after = steps[position].output(output)[0], step.output()[0]
            if before is None or after is None or before is not after:
                step.kind = "cast"
    return steps, positions


def _step(node: Any) -> Step:
    name = str(node.name())
    if name.endswith("AccumulateGrad"):
        return Step(node, name, "", "leaf", node.variable, [])
    function = function_of(node)
    op = _op_name(name) if function is None else _NAMES.get(function.__name__, function.__name__)
    kind: Literal["cast", "view", "op"] = "op"
    is_own = function is not None and function.__module__.startswith("hmpx.")
    if is_own:
        drawn_as = getattr(function, "drawn_as", op)
        kind, op = ("cast", op) if drawn_as == "cast" else ("op", drawn_as)
    elif function is None and _is_view(op):
        kind = "view"
    outputs, number = outputs_of(node), number_of(node)
    return Step(node, name, op, kind, None, outputs, number=number, is_own=is_own)


#: Better names for torch's own functions.
_NAMES: Final = {"CompiledFunction": "compiled graph", "CheckpointFunction": "checkpoint"}

#: Views that autograd names, but lists can't.
_VIEWS: Final = frozenset({"alias", "reshape_alias", "slice", "unsafe_view", "view_as_real"})

#: Ops named like views that copy values, and so get their own node.
_COMPUTING: Final = frozenset({"clone", "index"})


def _is_view(op: str) -> bool:
    known = ops.names().get(op)
    is_known_view = known is not None and op not in _COMPUTING and ops.is_view(known)
    return op in _VIEWS or is_known_view


def _op_name(name: str) -> str:
    """Returns ``"native_layer_norm"`` for ``"NativeLayerNormBackward0"``."""
    bare = re.sub(r"Backward\d*$", "", name) or name
    bare = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", bare.rpartition("::")[2])
    return bare.lower()


def short(dtype: torch.dtype | None) -> str:
    """Returns the short name of a dtype; "" if unknown."""
    return "" if dtype is None else short_name(dtype)
