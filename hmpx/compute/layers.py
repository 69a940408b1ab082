"""Legalized layers: convolutions in reused fp32 memory, linear layers of few rows.

The rounding points are those of `casting.legalized`, and autograd saves low-precision tensors. A linear layer's
weights are rounded while they are read, once: its sums have another order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..tensors import CAST, Args
from ..torch_internals import dispatch_modes, has_fake_tensors, has_tangents, transforms
from .composition import widen
from .scratch import Rounding, Temporaries, is_seen, kernels_for, memory_for

# Read before anything is patched: op lists may name any of them.
_add_, _new_empty, _numel = Tensor.add_, Tensor.new_empty, Tensor.numel
_reshape, _t = Tensor.reshape, Tensor.t
_mm, _sum = torch.mm, torch.sum
_convolution_backward = torch.ops.aten.convolution_backward.default

#: The ops that `convolution` supports -> their number of spatial dimensions.
CONVOLUTIONS: Final = {"conv1d": 1, "conv2d": 2, "conv3d": 3}

#: Elements of an input or a weight. Below this, fresh memory costs less than the bookkeeping of convolutions, and
#: weights of linear layers are read as fast twice.
LEAST: Final = 1 << 17


def is_large(x: Any, weight: Any) -> bool:
    """Whether `convolution` is faster for a convolution of ``x`` with ``weight``."""
    try:
        return bool(_numel(x) >= LEAST or _numel(weight) >= LEAST)
    except TypeError:  # one is not a tensor
        return False


def convolution(
    op: str, function: Callable[..., Tensor], args: Args, dtype: torch.dtype, *, rounds_inputs: bool
) -> Tensor | None:
    """Returns a convolution of tensors of torch's own classes, in ``dtype``; None if unsupported.

    With ``rounds_inputs`` fp32 inputs are rounded first.
    """
    if has_tangents() or is_seen():
        return None
    dimensions = CONVOLUTIONS[op]
    x, weight, bias = (*args[:3], None)[:3]
    settings = _settings(dimensions, args[3:])
    if settings is None or not is_large(x, weight):
        return None
    for tensor in (x, weight) if bias is None else (x, weight, bias):
        if not isinstance(tensor, Tensor) or tensor.dtype not in {dtype, torch.float32}:
            return None
        if tensor.layout is not torch.strided or tensor.device != x.device or not tensor.numel():
            return None
    if not x.dim() == weight.dim() == dimensions + 2:
        return None  # left to torch
    if weight.dtype is torch.float32 and type(weight) is not nn.Parameter:
        if not rounds_inputs:
            return None
        weight = CAST[dtype](weight)
    kept = None  # saved instead of x
    if x.dtype is torch.float32:
        low = CAST[dtype](x)
        x, kept = (low, None) if rounds_inputs else (x, low)
    apply: Callable[..., Tensor] = _Convolution.apply
    return apply(x, kept, weight, bias, function, settings, Rounding(dtype, rounds_inputs))


#: Strides, padding and dilation, one number for each dimension, and the groups.
_Settings = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]


def _settings(dimensions: int, given: Args) -> _Settings | None:
    """Returns a convolution's settings; None if they are strings, or too short."""
    if len(given) > 4:
        return None
    values: list[Any] = [*given, *(1, 0, 1, 1)[len(given) :]]
    groups = values.pop()
    lists = [(value,) * dimensions if type(value) is int else value for value in values]
    if not all([isinstance(each, (list, tuple)) and len(each) == dimensions for each in lists]):  # noqa: C419
        return None
    strides, padding, dilation = map(tuple, lists)
    return strides, padding, dilation, groups


class _Convolution(torch.autograd.Function):
    """The convolution of a batch."""

    drawn_as = "convolution"

    @staticmethod
    def forward(  # noqa: PLR0917  # there are no keywords
        ctx: Any,
        x: Tensor,  # low, unless fp32 inputs are not rounded
        kept: Tensor | None,  # for the backward, instead of an fp32 x
        weight: Tensor,  # low, or a parameter
        bias: Tensor | None,
        function: Callable[..., Tensor],
        settings: _Settings,
        rounding: Rounding,
    ) -> Tensor:
        ctx.save_for_backward(x if kept is None else kept, weight)
        ctx.settings, ctx.rounding = settings, rounding
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        memory = Temporaries(x.device)
        raised = [None if t is None else rounding.raised(t, memory) for t in (x, weight, bias)]
        result = CAST[rounding.dtype](function(*raised, *settings))
        memory.free()
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        settings, rounding = ctx.settings, ctx.rounding
        x_learns, _, weight_learns, bias_learns, *_ = ctx.needs_input_grad
        memory = memory_for(gradient)
        strides, padding, dilation, groups = settings
        found = _convolution_backward(
            memory.widen(gradient),
            rounding.raised(x, memory),
            rounding.raised(weight, memory),
            [weight.shape[0]],  # of the bias
            strides, padding, dilation, False, [0] * len(strides), groups,
            [x_learns, weight_learns, bias_learns],
        )  # fmt: skip
        of_x, of_weight, of_bias = [
            None if each is None else rounding.gradient(each, dtype, memory)
            for each, dtype in zip(found, ctx.dtypes, strict=True)
        ]
        memory.free()
        return of_x, None, of_weight, of_bias, None, None, None


FEW_ROWS: Final = 2  # with so few, reading the weights dominates


def is_read_once(x: Any, weight: Any, dtype: torch.dtype) -> bool:
    """Whether `linear` rounds a layer's weight while it multiplies it by `FEW_ROWS` or fewer."""
    if type(weight) is not nn.Parameter or weight.dtype is not torch.float32:
        return False
    if not isinstance(x, Tensor) or x.dim() < 2 or x.is_nested:
        return False
    if not 0 < _numel(x) <= FEW_ROWS * x.shape[-1]:
        return False
    return _numel(weight) >= LEAST and kernels_for(weight, dtype) is not None


def linear(args: Args, dtype: torch.dtype) -> Tensor | None:
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
