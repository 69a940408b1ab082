"""Calls in graphs: detection and rounding.

Compilers elide round-trip casts unless they are configured not to. If they may, rounding uses bit arithmetic
on fp32, which compilers fuse.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..tensors import CAST, ELIGIBLE, LOW_DTYPES, Args, Kwargs
from ..torch_internals import (
    INDUCTOR_CONFIG,
    has_tangents,
    is_graph_made,
    is_jit_tracing,
    is_planned,
    may_learn,
    run_when_traced,
)
from .composition import call_raised, rounded, widen

# Read before anything is patched: op lists may name any of them.
_add, _sub, _gt, _ne, _where = torch.add, torch.sub, torch.gt, torch.ne, torch.where


def is_traced() -> bool:
    """Whether the call becomes part of a graph, traced by Dynamo or by its backends."""
    if torch.compiler.is_dynamo_compiling():
        return True
    return is_graph_made() and not is_planned()


def is_exported() -> bool:
    """Whether the call becomes part of an exported file, which may run on any hardware."""
    if torch.compiler.is_exporting() or is_jit_tracing():
        return True
    return not torch.compiler.is_dynamo_compiling() and is_onnx_made()


def is_onnx_made() -> bool:
    """Whether the call becomes part of an ONNX file."""
    onnx = sys.modules.get("torch.onnx")
    return onnx is not None and onnx.is_in_onnx_export()


# Like `torch.compiler.assume_constant_result`, which imports Dynamo: inside it, torch denies the export.
vars(is_onnx_made)["_dynamo_marked_constant"] = True


def are_casts_kept() -> bool:
    """Whether inductor is configured to round where eager mode does."""
    config = sys.modules.get(INDUCTOR_CONFIG)
    return config is not None and config.emulate_precision_casts is True


run_when_traced(are_casts_kept)


def in_graph(
    function: Callable[..., Any],
    args: Args,
    kwargs: Kwargs,
    dtype: torch.dtype,
    accumulate_dtype: torch.dtype = torch.float32,
) -> Any:
    """Computes a low-precision call in ``accumulate_dtype``, with rounding to ``dtype`` that stays in the graph."""
    # Functions with their own backward have no forward-mode gradient; casts have both.
    keeps_casts = are_casts_kept() or has_tangents()

    def raise_one(tensor: Tensor) -> Tensor:
        if tensor.dtype in LOW_DTYPES and not keeps_casts:
            tensor = _cast(tensor, tensor.dtype, torch.float32)
        return CAST[accumulate_dtype](tensor)

    def convert(tensor: Tensor) -> Tensor:
        if dtype not in LOW_DTYPES or keeps_casts:
            return CAST[dtype](tensor)
        return _cast(widen(tensor), dtype, dtype)

    result = call_raised(function, args, kwargs, raise_one, ELIGIBLE)
    return rounded(result, convert, accumulate_dtype)


def _cast(tensor: Tensor, low: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Returns ``tensor`` in ``dtype``, rounded to ``low``; its gradient is rounded too."""
    if may_learn(tensor):
        return _Cast.apply(tensor, low, dtype)  # type: ignore[no-any-return, no-untyped-call]
    return CAST[dtype](round_fp32(widen(tensor), low))


class _Cast(torch.autograd.Function):
    """A cast that rounds in forward and backward."""

    drawn_as = "cast"

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, low: torch.dtype, dtype: torch.dtype) -> Tensor:
        return CAST[dtype](round_fp32(widen(tensor), low))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.dtype, ctx.low = inputs[0].dtype, inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return CAST[ctx.dtype](round_fp32(widen(gradient), ctx.low)), None, None


def round_fp32(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns float32 ``tensor`` rounded to a low-precision ``dtype``, without a cast or a gradient.

    Rounds to nearest, ties to even, like the cast; NaN stays NaN.
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
