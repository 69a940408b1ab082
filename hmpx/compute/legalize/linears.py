"""Legalized linear layers of few rows: their fp32 weights are rounded while they are read, once.

The rounding points are those of `casting.legalized`. Sums have another order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from ...tensors import CAST, Args
from ...torch_internals import dispatch_modes, has_fake_tensors, has_tangents, transforms
from ..composition import widen
from .scratch import kernels_for

# Read before anything is patched: op lists may name any of them.
_add_, _new_empty, _numel = Tensor.add_, Tensor.new_empty, Tensor.numel
_reshape, _t = Tensor.reshape, Tensor.t
_mm, _sum = torch.mm, torch.sum

#: Elements of a weight; smaller ones are read as fast twice.
LEAST: Final = 1 << 17

FEW_ROWS: Final = 2  # with so few, reading the weights dominates


def is_read_once(x: Any, weight: Any, dtype: torch.dtype) -> bool:
    """Whether `compute` rounds a layer's weight while it multiplies it by `FEW_ROWS` or fewer."""
    if type(weight) is not nn.Parameter or weight.dtype is not torch.float32:
        return False
    if not isinstance(x, Tensor) or x.dim() < 2 or x.is_nested:
        return False
    if not 0 < _numel(x) <= FEW_ROWS * x.shape[-1]:
        return False
    return _numel(weight) >= LEAST and kernels_for(weight, dtype) is not None


def compute(args: Args, dtype: torch.dtype) -> Tensor | None:
    """Returns the output of a linear layer in ``dtype``, to which its inputs are rounded; None unless `is_read_once`.

    Of ``args`` (input, weight and perhaps bias) fp32 ones may be cast already.
    """
    layer = _layer(args, dtype)
    if layer is None or not is_read_once(*layer[:2], dtype):
        return None
    x, weight, bias = layer
    if dispatch_modes() and has_fake_tensors():
        return None
    if bias is not None and bias.dtype is torch.float32 and not isinstance(bias, nn.Parameter):
        return None
    apply: Callable[..., Tensor] = _Linear.apply
    return apply(CAST[dtype](x) if x.dtype is torch.float32 else x, weight, bias, dtype)


def _layer(args: Args, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Returns input, weight and bias, if torch would compute one product on the CPU."""
    if not 2 <= len(args) <= 3:
        return None
    x, weight, bias = (*args, None)[:3]
    for tensor in (x, weight) if bias is None else (x, weight, bias):
        if not isinstance(tensor, Tensor) or not (tensor.is_cpu and tensor.is_contiguous()):
            return None
        if tensor.dtype is not dtype and tensor.dtype is not torch.float32:
            return None
    if not x.dim() or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        return None
    if bias is not None and bias.shape != weight.shape[:1]:
        return None
    return None if has_tangents() or transforms() is not None else (x, weight, bias)


class _Linear(torch.autograd.Function):
    """x @ weight.T + bias."""

    drawn_as = "linear"

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [..., k]: low
        weight: Tensor,  # [n, k]: a parameter, rounded in the backward again
        bias: Tensor | None,  # [n]: low, or a parameter
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dtype, ctx.of_bias = dtype, None if bias is None else bias.dtype
        kernels = kernels_for(weight, dtype)
        assert kernels is not None  # see `is_read_once`
        product = _new_empty(weight, (*x.shape[:-1], weight.shape[0]))
        kernels.multiply(widen(x), weight, product)
        if bias is not None:
            _add_(product, widen(CAST[dtype](bias)))
        return CAST[dtype](product)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), low = ctx.saved_tensors, CAST[ctx.dtype]
        n, k = weight.shape
        wide = _reshape(widen(gradient), (-1, n))
        x_learns, weight_learns, bias_learns, _ = ctx.needs_input_grad
        found: list[Tensor | None] = [None, None, None]
        if x_learns:
            found[0] = _reshape(low(_mm(wide, widen(low(weight)))), x.shape)
        if weight_learns:
            found[1] = widen(low(_mm(_t(wide), widen(_reshape(x, (-1, k))))))
        if bias_learns:
            found[2] = CAST[ctx.of_bias](low(_sum(wide, 0)))
        return *found, None
