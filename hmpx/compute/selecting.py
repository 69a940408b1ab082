"""Ops that select elements of a low-precision table: the result is cast, and gradients add up in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from ..tensors import CAST, Args, Kwargs
from ..torch_internals import data_of, has_tangents, is_jit_tracing, transforms
from .composition import Inputs
from .legalize.graphs import is_traced

# Taken before anything is patched.
_copy_, _empty_strided = Tensor.copy_, torch.empty_strided

#: Smaller tables are cast in less time than a function of autograd's takes.
_LEAST: Final = 1 << 16


def selected(
    function: Callable[..., Any], args: Args, kwargs: Kwargs, inputs: Inputs, dtype: torch.dtype
) -> Tensor | None:
    """Returns the selected elements in ``dtype``; None if the table has to be upcast instead.

    The gradient is that of an fp32 table, since torch adds it up in the table's dtype. Graphs, torch.func
    and tangents need the upcast.

    Args:
        function: torch's function, which selects from its first floating-point input.
        args: Positional arguments.
        kwargs: Keyword arguments.
        inputs: Facts about the floating-point inputs.
        dtype: The dtype of the result.
    """
    table = inputs.first
    if table is not inputs.low or transforms() is not None or has_tangents():
        return None
    if not inputs.is_learning:
        return CAST[dtype](function(*args, **kwargs))
    if not inputs.is_plain or is_traced() or is_jit_tracing() or table.numel() < _LEAST:
        return None
    outline = _Outline.apply(table)  # type: ignore[no-untyped-call]
    new_args = [outline if value is table else value for value in args]
    named = {name: outline if value is table else value for name, value in kwargs.items()}
    result = function(*new_args, **named)
    with torch.no_grad():  # the gradient of a selection needs none of its values
        _copy_(data_of(result), function(*args, **kwargs))
    return CAST[dtype](result)


class _Outline(torch.autograd.Function):
    """A tensor of the table's shape that takes no memory. Autograd rounds its fp32 gradient to the table's dtype."""

    drawn_as = "cast"

    @staticmethod
    def forward(ctx: Any, table: Tensor) -> Tensor:
        strides = [0] * table.dim()
        return _empty_strided(table.shape, strides, dtype=torch.float32, device=table.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
