"""Casts through which gradients of any layout pass: torch's own take those of the tensor's layout only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .dtypes import CAST


def cast_any_layout(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Returns a cast to ``dtype`` of tensors that are sparse, or get sparse gradients."""
    return functools.partial(_Cast.apply, dtype)


class _Cast(torch.autograd.Function):
    drawn_as = "cast"
    generate_vmap_rule = True

    @staticmethod
    def forward(dtype: torch.dtype, tensor: Tensor) -> Tensor:
        return CAST[dtype](tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.dtype, Tensor], output: Tensor) -> None:
        ctx.dtype = inputs[1].dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, CAST[ctx.dtype](gradient)
