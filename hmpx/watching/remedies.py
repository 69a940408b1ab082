"""What kind of fault an offence is, and which line of an op list would have prevented it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import torch

from .. import ops
from ..tensors import LOW_DTYPES, Named
from .offences import Kind, Range
from .records import NAN

if TYPE_CHECKING:
    from .judging import Origin

_GREATEST: Final = torch.finfo(torch.float32).max

#: Conversions, which no op list decides about.
_CONVERTING: Final = ops.facts("converting").keys()

#: Ops that are infinite or undefined at zero: of which input.
_POLES: Final = {
    "div": 1,
    "truediv": 1,
    "rtruediv": 0,
    "rdiv": 0,
    "true_divide": 1,
    "floor_divide": 1,
    "remainder": 1,
    "fmod": 1,
    "reciprocal": 0,
    "rsqrt": 0,
    "log": 0,
    "log2": 0,
    "log10": 0,
    "logit": 0,
    "lgamma": 0,
    "digamma": 0,
    "addcdiv": 2,
    "atan2": 1,
}
#: The largest input whose result is finite in float32.
_GROWING: Final = {
    "exp": math.log(_GREATEST),
    "expm1": math.log(_GREATEST),
    "exp2": 128.0,
    "sinh": math.log(_GREATEST) + math.log(2),
    "cosh": math.log(_GREATEST) + math.log(2),
    "square": math.sqrt(_GREATEST),
}
_PRODUCTS: Final = frozenset(
    {
        "mul", "imul", "rmul", "matmul", "rmatmul", "mm", "bmm", "mv", "dot", "vdot", "inner", "outer",
        "linear", "einsum", "addmm", "baddbmm", "addbmm", "conv1d", "conv2d", "conv3d",
    }
)  # fmt: skip


def is_low(origin: Origin) -> bool:
    """Whether the call computed in low precision, or a number format."""
    call = origin.record.call
    if _is_emulated(origin):
        return True
    return not LOW_DTYPES.isdisjoint((*call.cast_dtypes, *call.output_dtypes, call.dtype))


def _is_emulated(origin: Origin) -> bool:
    """Whether the call computed in a number format, some of which overflow to NaN."""
    dtype = origin.record.call.dtype
    return dtype is not None and not isinstance(dtype, torch.dtype)


def kind_of(origin: Origin, ranges: tuple[Range, ...]) -> Kind:
    """Returns the kind of an offence."""
    if origin.source in ("input", "parameter"):
        return "nan" if origin.bits & NAN else "inf"
    if _became_zero(origin, ranges):
        return "underflow"
    if is_low(origin) and (not origin.bits & NAN or _is_emulated(origin)):
        is_pole = not origin.is_backward and _is_at_pole(origin, ranges)
        if not is_pole and not _overflows_in_fp32(origin, ranges):
            return "overflow"
    return "nan" if origin.bits & NAN else "inf"


def remedy_for(origin: Origin, kind: Kind, ranges: tuple[Range, ...]) -> str:
    """Returns a line for an op list, or why none helps."""
    call = origin.record.call
    if origin.source in ("input", "parameter"):
        what = "the parameter" if origin.source == "parameter" else "an input"
        return f"none: {what} was not finite before any op that was seen"
    if origin.source == "gradient":
        return (
            "none: the gradient came from something else than an op: the loss, a hook, a "
            "torch.autograd.Function, or a sum of gradients"
        )
    if origin.node:
        return f"none: {origin.node} is not an op of torch"
    if call.op in _CONVERTING:
        return (
            f"none: {call.op} is the program's own conversion to {_name(*call.output_dtypes)}; leave "
            "it out, or keep values in its range"
        )
    if not is_low(origin):
        return f"none: {call.op} ran in float32 already; its inputs have to change"
    if call.cast_policy == "TARGET":
        return (
            f"none: {call.op} writes to a tensor of {_name(*call.output_dtypes, call.dtype)}, which keeps its dtype; "
            "make that tensor float32"
        )
    if not origin.is_backward and _overflows_in_fp32(origin, ranges):
        return f"none: {call.op} overflows in float32, too"
    if not origin.is_backward and kind != "underflow" and _is_at_pole(origin, ranges):
        return f"none: an input of {call.op} is zero, which float32 can't mend here"
    if call.reason == "casts are switched off":
        return f"none: casts are switched off here; with them on, fp32.txt: {call.op}"
    return f"fp32.txt: {call.op}"


def _name(dtype: torch.dtype | Named | None, *_: Any) -> str:
    return str(getattr(dtype, "name", dtype)).removeprefix("torch.")


def _inputs(ranges: tuple[Range, ...]) -> dict[int, Range]:
    return {
        int(each.name.removeprefix("input ")): each
        for each in ranges
        if each.name.startswith("input ")
    }


def _is_at_pole(origin: Origin, ranges: tuple[Range, ...]) -> bool:
    """Whether the input that must not be zero may be."""
    position = _POLES.get(origin.record.call.op)
    if position is None:
        return False
    inputs = _inputs(ranges)
    found = inputs.get(position, inputs.get(len(inputs) - 1))
    return found is not None and found.min <= 0 <= found.max


def _became_zero(origin: Origin, ranges: tuple[Range, ...]) -> bool:
    """Whether the input that must not be zero was not, before it was cast."""
    call = origin.record.call
    position = _POLES.get(call.op)
    if position is None or origin.is_backward:
        return False
    found = _inputs(ranges).get(position)
    if found is None or found.min <= 0 <= found.max:
        return False
    least = min(abs(found.min), abs(found.max))
    lowest = [
        torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2
        for dtype in (*call.cast_dtypes, call.dtype)
        if isinstance(dtype, torch.dtype) and dtype in LOW_DTYPES
    ]
    return bool(lowest) and least <= max(lowest)


def _overflows_in_fp32(origin: Origin, ranges: tuple[Range, ...]) -> bool:
    """Whether the op overflows on these inputs in float32, too, as far as their ranges tell."""
    op, inputs = origin.record.call.op, _inputs(ranges)
    if op in _GROWING and inputs:
        return max(each.amax for each in inputs.values()) > _GROWING[op]
    if op in _PRODUCTS and len(inputs) > 1:
        return math.prod(each.amax for each in inputs.values()) > _GREATEST
    return False
