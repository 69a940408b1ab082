"""Tensors as values: dtypes and devices, lists of them, tensors in one chunk of memory, constants."""

from __future__ import annotations

from .chunks import cast_as_one, chunk_of
from .constants import Constant
from .dtypes import (
    CAST,
    COMPUTED,
    ELIGIBLE,
    LOW_PRECISION,
    Named,
    is_available,
    long_name,
    parse_device_type,
    parse_device_types,
    parse_name,
    short_name,
)
from .sequences import with_items

__all__ = [
    "CAST",
    "COMPUTED",
    "ELIGIBLE",
    "LOW_PRECISION",
    "Constant",
    "Named",
    "cast_as_one",
    "chunk_of",
    "is_available",
    "long_name",
    "parse_device_type",
    "parse_device_types",
    "parse_name",
    "short_name",
    "with_items",
]
