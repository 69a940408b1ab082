"""The rule for one call: what its inputs are cast to."""

from __future__ import annotations

from .cache import cache_patches
from .casting import (
    LOW_DTYPES,
    NUMBERS,
    PLAIN_TENSORS,
    SEQUENCES,
    TARGET,
    Args,
    CallPlan,
    Kwargs,
    cast_args,
    converter,
    decided_by,
    floating_inputs,
    is_on_device,
    is_settled,
    is_widened,
    target_dtype,
    widest,
    written,
)

__all__ = [
    "LOW_DTYPES",
    "NUMBERS",
    "PLAIN_TENSORS",
    "SEQUENCES",
    "TARGET",
    "Args",
    "CallPlan",
    "Kwargs",
    "cache_patches",
    "cast_args",
    "converter",
    "decided_by",
    "floating_inputs",
    "is_on_device",
    "is_settled",
    "is_widened",
    "target_dtype",
    "widest",
    "written",
]
