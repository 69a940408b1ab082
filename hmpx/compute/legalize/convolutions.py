"""Legalized convolutions and their gradients, in reused fp32 memory.

The rounding points are those of `wrappers.legalized`, and autograd saves low-precision tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from ...tensors import CAST, Args
from ...torch_internals import has_tangents
from .scratch import Rounding, Temporaries, is_seen, memory_for

# Read before anything is patched: op lists may name any of them.
_numel = Tensor.numel
_convolution_backward = torch.ops.aten.convolution_backward.default

#: The ops that `compute` supports -> their number of spatial dimensions.
CONVOLUTIONS: Final = {"conv1d": 1, "conv2d": 2, "conv3d": 3}

#: Elements of an input; below this, fresh memory costs less than the bookkeeping here.
_LEAST: Final = 1 << 17


class ConvolutionSettings(NamedTuple):
    """The arguments of a convolution after its tensors: one number for each dimension, and the groups."""

    padding: tuple[int, ...]
    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def is_large(x: Any, weight: Any) -> bool:
    """Whether `compute` is faster for a convolution of ``x`` with ``weight``."""
    try:
        return bool(_numel(x) >= _LEAST or _numel(weight) >= _LEAST)
    except TypeError:  # one is not a tensor
        return False


def compute(
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


def _settings(dimensions: int, given: Args) -> ConvolutionSettings | None:
    """Returns a convolution's settings; None if they are strings, or too short."""
    if len(given) > 4:
        return None
    values: list[Any] = [*given, *(1, 0, 1, 1)[len(given) :]]
    groups = values.pop()
    lists = [(value,) * dimensions if type(value) is int else value for value in values]
    if not all([isinstance(each, (list, tuple)) and len(each) == dimensions for each in lists]):  # noqa: C419
        return None
    strides, padding, dilation = map(tuple, lists)
    return ConvolutionSettings(padding, strides, dilation, groups)


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
        settings: ConvolutionSettings,
        rounding: Rounding,
    ) -> Tensor:
        ctx.save_for_backward(x if kept is None else kept, weight)
        ctx.settings, ctx.rounding = settings, rounding
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        memory = Temporaries(x.device)
        raised = [None if t is None else rounding.raised(t, memory) for t in (x, weight, bias)]
        padding, strides, dilation, groups = settings
        result = CAST[rounding.dtype](function(*raised, strides, padding, dilation, groups))
        memory.free()
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        settings, rounding = ctx.settings, ctx.rounding
        x_learns, _, weight_learns, bias_learns, *_ = ctx.needs_input_grad
        memory = memory_for(gradient)
        padding, strides, dilation, groups = settings
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
