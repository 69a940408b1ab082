"""Rounding in graphs: compilers elide round-trip casts unless they are configured not to.

Where a compiler may elide them, rounding is arithmetic on the bits of fp32, fused with its
surroundings. Independent of which ops are computed this way, and why.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..tensors import CAST, ELIGIBLE, LOW_DTYPES, Args, Kwargs
from ..torch_internals import INDUCTOR_CONFIG, has_tangents, may_learn, run_when_traced
from .composition import call_raised, rounded, widen

# Taken before anything is patched: op lists may name any of them.
_add, _sub, _gt, _ne, _where = torch.add, torch.sub, torch.gt, torch.ne, torch.where


def in_graph(
    function: Callable[..., Any],
    args: Args,
    kwargs: Kwargs,
    dtype: torch.dtype,
    accumulate_dtype: torch.dtype = torch.float32,
) -> Any:
    """Computes the op with rounding that survives a compiler's removal of round-trip casts.

    Args:
        function: torch's function.
        args: Positional arguments, in low precision.
        kwargs: Keyword arguments, likewise.
        dtype: The dtype of the result.
        accumulate_dtype: The dtype the function computes in.
    """
    # What has a backward of its own has no forward-mode gradient; casts have both.
    keeps_casts = are_casts_kept() or has_tangents()

    def raise_one(tensor: Tensor) -> Tensor:
        if tensor.dtype in LOW_DTYPES and not keeps_casts:
            tensor = _raised_in_graph(tensor)
        return CAST[accumulate_dtype](tensor)

    result = call_raised(function, args, kwargs, raise_one, ELIGIBLE)

    def convert(tensor: Tensor) -> Tensor:
        if dtype not in LOW_DTYPES or keeps_casts:
            return CAST[dtype](tensor)
        tensor = widen(tensor)
        if may_learn(tensor):
            return _RoundOutput.apply(tensor, dtype)  # type: ignore[no-any-return, no-untyped-call]
        return CAST[dtype](round_fp32(tensor, dtype))

    return rounded(result, convert, accumulate_dtype)


def are_casts_kept() -> bool:
    """Whether inductor is set to round where eager mode does."""
    config = sys.modules.get(INDUCTOR_CONFIG)
    return config is not None and config.emulate_precision_casts is True


run_when_traced(are_casts_kept)


def _raised_in_graph(tensor: Tensor) -> Tensor:
    if may_learn(tensor):
        return _RoundInput.apply(tensor)  # type: ignore[no-any-return, no-untyped-call]
    return round_fp32(widen(tensor), tensor.dtype)


class _RoundInput(torch.autograd.Function):
    """Low precision -> fp32, rounding in forward and backward."""

    drawn_as = "cast"

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor) -> Tensor:
        return round_fp32(widen(tensor), tensor.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return CAST[ctx.dtype](round_fp32(widen(gradient), ctx.dtype))


class _RoundOutput(torch.autograd.Function):
    """fp32 -> low precision, rounding in forward and backward."""

    drawn_as = "cast"

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return CAST[dtype](round_fp32(tensor, dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, torch.dtype], output: Tensor) -> None:
        ctx.dtype = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return round_fp32(widen(gradient), ctx.dtype), None


def round_fp32(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns ``tensor`` rounded to ``dtype`` but kept in float32, without a cast to ``dtype``.

    Rounds to nearest, ties to even, as the cast would; NaN stays NaN. Has no gradient.

    Args:
        tensor: float32, of any shape.
        dtype: ``torch.bfloat16`` or ``torch.float16``.
    """
    bits = tensor.view(torch.int32)
    is_nan = _ne(tensor, tensor)  # inductor's C++ evaluates `isnan` one element at a time
    if dtype is torch.bfloat16:
        # Add half a unit in the last place minus one, plus one if the last place is odd.
        whole = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        return _where(is_nan, tensor, whole.view(torch.float32))
    # Adding 2**13 times the largest power of two not above it leaves float16's ten mantissa bits;
    # below float16's smallest normal number the power stays that of 2**-14.
    exponent = (bits & 0x7F800000).clamp(113 << 23, 143 << 23)
    power = (exponent + (13 << 23)).view(torch.float32)
    magnitude = (bits & 0x7FFFFFFF).view(torch.float32)
    magnitude = _sub(_add(magnitude, power), power)
    magnitude = _where(_gt(magnitude, 65504.0), float("inf"), magnitude)
    magnitude = _where(is_nan, tensor, magnitude)
    return (magnitude.view(torch.int32) | (bits & -0x80000000)).view(torch.float32)
