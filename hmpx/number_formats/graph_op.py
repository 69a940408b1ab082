"""Rounding as one op of a graph: torch.compile is seconds faster than with the dozen ops that compose it.

For the CPU, where the compiled kernels run it. Elsewhere compilers fuse the ops, which costs less than
another pass over memory. Exported programs also contain the ops, since they run without hmpx.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from ..tensors import PLAIN_TENSORS
from ..torch_internals import (
    HAS_OPERATORS,
    FakeTensor,
    FunctionalTensor,
    own_operator,
    run_when_traced,
    set_kernel,
    tracing_context,
    transforms,
)
from .layouts import Layout
from .plans import Plan
from .unpatched import EMPTY_LIKE

#: The classes of tensors that dynamo and AOTAutograd trace.
_TRACED: Final = frozenset({*PLAIN_TENSORS, FunctionalTensor, FakeTensor})


def _shaped(x: Tensor, plan: str, keys: Tensor | None) -> Tensor:
    return EMPTY_LIKE(x)


#: Takes a tensor, the plan as text (`text_of`), and the keys of noise.
OP: Final = own_operator("rounded(Tensor x, str plan, Tensor? keys) -> Tensor", _shaped)


def run_by(run: Callable[[Tensor, str, tuple[int, int]], Tensor]) -> None:
    """Sets the implementation of the op: a function of (tensor, the plan as text, keys of noise)."""

    def rounded(x: Tensor, plan: str, keys: Tensor | None) -> Tensor:
        first, second = (0, 0) if keys is None else keys.tolist()
        return run(x, plan, (first & 0xFFFFFFFF, second & 0xFFFFFFFF))

    set_kernel(OP, rounded, "CPU")


def read(text: str) -> tuple[tuple[Any, ...], Layout | None]:
    """Returns the `Plan.constants` and the layout from the text of `text_of`."""
    constants, layout = json.loads(text)
    return _tuples(constants), None if layout is None else Layout(*layout)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def text_of(plan: Plan, layout: Layout | None) -> str:
    """Returns a plan and its layout as text, for graphs."""
    return json.dumps((plan.constants(), None if layout is None else (layout.kind, layout.axis)))


def is_taken(x: Tensor) -> bool:
    """Whether a graph that torch.compile traces uses the op for ``x``."""
    return type(x) in _TRACED and x.device.type == "cpu" and is_compiled()


@run_when_traced
def is_compiled() -> bool:
    """Whether torch.compile is tracing, without transforms that have no rule for the op."""
    return (
        HAS_OPERATORS
        and tracing_context() is not None
        and not torch.compiler.is_exporting()
        and transforms() is None
    )
