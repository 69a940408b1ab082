"""Legalized linear layers, in reused fp32 memory.

The same products as torch's for a linear layer and its backward, with the rounding points of
`wrappers.legalized`, so results are bit-identical; but for products of few rows, see `is_read_once`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from ...errors import raised_here
from ...tensors import CAST, Args
from ...torch_internals import dispatch_modes, has_fake_tensors, has_tangents, transforms
from ..composition import widen
from .scratch import New, Rounding, Temporaries, kernels_for, memory_for

# Read before anything is patched: op lists may name any of them.
_add_, _new_empty, _numel = Tensor.add_, Tensor.new_empty, Tensor.numel
_reshape, _t = Tensor.reshape, Tensor.t
_addmm, _mm, _sum = torch.addmm, torch.mm, torch.sum

#: Elements of the input, the output or the weight; below this, fresh memory costs less than `compute`'s bookkeeping.
LEAST: Final = 1 << 17

FEW_ROWS: Final = 2  # with so few, reading the weights dominates


def is_large(x: Any, weight: Any) -> bool:
    """Whether `compute` is faster for a linear layer of ``x`` with ``weight``."""
    try:
        n, k = weight.shape
        return bool(k and max(n * k, _numel(x) // k * max(n, k)) >= LEAST)
    except raised_here(TypeError, ValueError, AttributeError):  # they are not a tensor and a matrix
        return False


def is_read_once(x: Tensor, weight: Any, dtype: torch.dtype) -> bool:
    """Whether `compute` rounds a layer's weight while it multiplies it by `FEW_ROWS` or fewer."""
    is_wide = type(weight) is nn.Parameter and weight.dtype is torch.float32
    if not is_wide or x.dim() < 2 or not 0 < _numel(x) <= FEW_ROWS * x.shape[-1]:
        return False
    return _numel(weight) >= LEAST and kernels_for(weight, dtype) is not None


def compute(args: Args, given: Args, dtype: torch.dtype, *, rounds_inputs: bool) -> Tensor | None:
    """Returns the output of a large linear layer, see `LEAST`, in ``dtype``; None if unsupported.

    Of ``args`` (input, weight and perhaps bias; before casts ``given``), those to round are already in
    ``dtype``, or all are uncast. With ``rounds_inputs`` fp32 inputs are rounded first.
    """
    layer = _layer(args, dtype)
    if layer is None:
        return None
    reads_once = rounds_inputs and is_read_once(*layer[:2], dtype)
    x, weight, bias = layer
    if x.dim() < 2 or (dispatch_modes() and (has_fake_tensors() or not reads_once)):
        return None
    source = weight  # the source of the backward's weight
    if isinstance(given[1], nn.Parameter):
        source = given[1]
    elif weight.dtype is torch.float32:
        return None
    is_wide = bias is not None and bias.dtype is torch.float32
    if rounds_inputs and is_wide and not isinstance(bias, nn.Parameter):
        return None
    kept = None
    if x.dtype is torch.float32:
        x, kept = (CAST[dtype](x), None) if rounds_inputs else (x, CAST[dtype](x))
    # The source is not an input of the function: its gradient flows through the weight's cast.
    rounding = Rounding(dtype, rounds_inputs)
    apply: Callable[..., Tensor] = _Linear.apply
    return apply(x, weight, bias, kept, (source,), rounding)


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
    def forward(  # noqa: PLR0917  # there are no keywords
        ctx: Any,
        x: Tensor,  # [..., k]: low, unless fp32 inputs are not rounded
        weight: Tensor,  # [n, k]: low, or a parameter
        bias: Tensor | None,  # [n]: likewise
        kept: Tensor | None,  # for the backward, instead of an fp32 x
        sources: tuple[Tensor],  # rounded in the backward, instead of keeping the weight
        rounding: Rounding,
    ) -> Tensor:
        ctx.save_for_backward(x if kept is None else kept, *sources)
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.rounding = rounding
        return _output(x, weight, bias, rounding)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, source = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.dtypes
        rounding: Rounding = ctx.rounding
        x_learns, weight_learns, bias_learns, *_ = ctx.needs_input_grad
        memory = memory_for(gradient)
        n, k = source.shape
        is_plain = gradient.is_contiguous()
        wide = _reshape(memory.widen(gradient) if is_plain else widen(gradient), (-1, n))
        found: list[Tensor | None] = [None, None, None]
        if x_learns:
            if source.dtype is of_weight:  # the dtype of the forward's input
                weight = rounding.raised(source, memory)
            else:
                weight = memory.rounded(source, of_weight)
            found[0] = _reshape(_product(memory, wide, weight, of_x, rounding), x.shape)
        if weight_learns:
            rows = _reshape(_raised(x, memory), (-1, k))
            found[1] = _product(memory, _t(wide), rows, of_weight, rounding)
        if bias_learns:
            found[2] = rounding.gradient(_sum(wide, 0), of_bias, memory)
        memory.free()
        return *found, None, None, None


def _output(x: Tensor, weight: Tensor, bias: Tensor | None, rounding: Rounding) -> Tensor:
    if rounding.rounds_inputs and is_read_once(x, weight, rounding.dtype):
        return _read_once(x, weight, bias, rounding)
    memory = Temporaries(x.device)
    n, k = weight.shape
    rows = _reshape(_raised(x, memory), (-1, k))
    columns = _t(rounding.raised(weight, memory))
    product = memory.empty((rows.shape[0], n), (n, 1))
    if bias is None:
        _mm(rows, columns, out=product)
    else:
        _addmm(rounding.raised(bias, memory), rows, columns, out=product)
    # Not a view of the cast result: autograd refuses writes to views made without it.
    result = CAST[rounding.dtype](_reshape(product, (*x.shape[:-1], n)))
    memory.free()
    return result


def _read_once(x: Tensor, weight: Tensor, bias: Tensor | None, rounding: Rounding) -> Tensor:
    kernels = kernels_for(weight, rounding.dtype)
    assert kernels is not None  # see `is_read_once`
    product = _new_empty(weight, (*x.shape[:-1], weight.shape[0]))
    kernels.multiply(widen(x), weight, product)
    if bias is not None:
        _add_(product, rounding.raised(bias, New()))
    return CAST[rounding.dtype](product)


def _raised(tensor: Tensor, memory: New) -> Tensor:
    return tensor if tensor.dtype is torch.float32 else memory.widen(tensor)


def _product(memory: New, a: Tensor, b: Tensor, dtype: torch.dtype, rounding: Rounding) -> Tensor:
    if dtype is torch.float32:
        return rounding.gradient(_mm(a, b), dtype, memory)
    return CAST[dtype](memory.mm(a, b))
