"""Effective precision: the narrowest dtype that a tensor's values came from.

An fp32 tensor whose values all end in 16 zero bits was bf16 before: a dtype tells of the container, not of
its contents.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ..errors import OptionError, raised_here
from ..tensors import PLAIN_TENSORS
from ..torch_internals import is_graph_made, is_jit_tracing, transforms
from ..torch_state import without_casts

#: Values that are read at a time: they stay in the cache.
_ROW: Final = 1 << 15
#: The same on a device, where each time costs several kernels.
_DEVICE_ROW: Final = 1 << 24

#: Values of the sample that tells rounded values from integers and small sets.
_SAMPLE: Final = 512

#: Fewer distinct magnitudes are constants, masks or a small set: no evidence of rounding.
_FEWEST: Final = 16

#: The last bit of half of all rounded values is one. Where it hardly ever is, values are short by nature: positions
#: times slopes.
_LEAST_ODD: Final = 1 / 8

#: The bits of an fp32 value that are zero if it was bf16, and if it was fp16.
_BELOW_BF16: Final = (1 << 16) - 1
BELOW_FP16: Final = (1 << 13) - 1


def contents(tensor: Tensor) -> torch.dtype | None:
    """Returns the narrowest dtype that holds each value of ``tensor`` exactly.

    The dtype is float32, float16 or bfloat16 (which is preferred to float16 where both fit), or the
    tensor's own. None where values can't show rounding: at most 16 distinct magnitudes
    (constants, masks), small integers times a power of two (positions, images), or hardly any that
    needs the last bit of the dtype (positions times slopes).

    Reads the values once; stops at the first part that tells them from low precision.

    Args:
        tensor: Any shape and device; float32 or float64. Other floating dtypes are returned as they are.

    Raises:
        OptionError: ``tensor`` is not a floating-point tensor.

    Example:
        >>> x = torch.linspace(0, 1, 100)
        >>> hmpx.contents(x), hmpx.contents(x.bfloat16().float())
        (torch.float32, torch.bfloat16)
    """
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        raise OptionError(f"contents takes a floating-point tensor, not {_named(tensor)}")
    if not is_readable(tensor):
        raise OptionError(f"contents takes a plain, strided tensor, not a {_kind(tensor)} one")
    if tensor.dtype not in (torch.float32, torch.float64):
        return tensor.dtype
    with without_casts(), torch.no_grad():
        values = tensor.detach().resolve_neg().reshape(-1)
        # Strides are odd: values may have patterns of powers of two.
        sample = values[:: values.numel() // _SAMPLE | 1][:_SAMPLE]
        if tensor.dtype is torch.float64:
            if not (_is_fp32(sample) and _is_fp32(values)):
                return torch.float64
            sample, values = sample.float(), values.float()
        is_bf16 = True
        for each in (sample, *torch.split(values, _row(values))):
            bits = each.view(torch.int32)
            if len(bits) and (bits & BELOW_FP16).max() > 0:  # faster than any()
                return torch.float32
            is_bf16 = is_bf16 and not (len(bits) and (bits & _BELOW_BF16).max() > 0)
        if is_bf16:
            return torch.bfloat16 if _is_evidence(sample, torch.bfloat16) else None
        if not _is_fp16(values):
            return torch.float32
        return torch.float16 if _is_evidence(sample, torch.float16) else None


def has_values(tensor: Tensor) -> bool:
    """Whether ``tensor`` has values that can be read: plain, strided, with storage."""
    return (
        type(tensor) in PLAIN_TENSORS
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_nested
        and not tensor.is_quantized
        and _has_storage(tensor)
    )


def is_readable(tensor: Tensor) -> bool:
    """Whether ``tensor`` has real floating-point values that can be read."""
    return tensor.is_floating_point() and has_values(tensor)


def _has_storage(tensor: Tensor) -> bool:
    # FSDP frees storages; kernels crash on these.
    try:
        return not tensor.numel() or tensor.untyped_storage().nbytes() > 0
    except raised_here(RuntimeError):  # a wrapper of torch.func
        return False


def may_read() -> bool:
    """Whether observers may read values: no graph is traced, and no transform of torch.func runs."""
    is_traced = torch.compiler.is_compiling() or is_graph_made() or is_jit_tracing()
    return not is_traced and transforms() is None


def _row(values: Tensor) -> int:
    """Returns how many values are read at a time: few on the CPU, where they stay in its cache."""
    return _ROW if values.device.type == "cpu" else _DEVICE_ROW


def _is_fp32(values: Tensor) -> bool:
    """Whether float32 holds all float64 values."""
    parts = torch.split(values, _row(values))
    return all(bool(((each.float() == each) | each.isnan()).all()) for each in parts)


def _is_fp16(values: Tensor) -> bool:
    """Whether float16 holds all fp32 values with its number of significant bits."""
    for each in torch.split(values, _row(values)):
        steps = each.abs().mul_(2.0**24)  # of the least subnormal number
        is_held = (steps == steps.trunc()) & (steps <= 65504 * 2.0**24)
        if not (is_held | ~each.isfinite()).all():
            return False
    return True


def _is_evidence(sample: Tensor, low: torch.dtype) -> bool:
    """Whether values that ``low`` holds are likely to be rounded ones."""
    magnitudes = torch.unique(sample.double().abs())
    magnitudes = magnitudes[(magnitudes > 0) & (magnitudes < torch.inf)]
    if len(magnitudes) <= _FEWEST:
        return False
    mantissa, _ = torch.frexp(magnitudes)
    power = magnitudes / mantissa  # of two: exact
    whole = (mantissa * 2**24).to(torch.int64)
    step = ((whole & -whole) * power).min() / 2**24
    least, largest = magnitudes[0], magnitudes[-1]
    info = torch.finfo(low)
    ulps = (power * (info.eps / 2)).clamp_(min=info.smallest_normal * info.eps)
    is_odd = (magnitudes / ulps) % 2 == 1
    if is_odd.sum() < _LEAST_ODD * len(is_odd):
        return False
    return bool(largest > 2 / info.eps * step or largest < 4 * least)


def _kind(tensor: Tensor) -> str:
    if tensor.layout is not torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    return "meta" if tensor.device.type == "meta" else type(tensor).__name__


def _named(value: object) -> str:
    return f"{value.dtype}" if isinstance(value, Tensor) else type(value).__name__
