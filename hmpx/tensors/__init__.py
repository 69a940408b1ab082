"""Tensors as values: dtypes and devices, lists of tensors, chunks of memory, constants."""

from __future__ import annotations

from .chunks import cast_as_one, chunk_of, is_in_memory
from .constants import Constant
from .devices import (
    default_device_types,
    is_available,
    is_present,
    parse_device_type,
    parse_device_types,
)
from .dtypes import (
    CAST,
    COMPUTED,
    ELIGIBLE,
    LOW_DTYPES,
    LOW_PRECISION,
    Named,
    is_low,
    long_name,
    parse_name,
    short_name,
)
from .layouts import cast_any_layout
from .nested import (
    NUMBERS,
    PLAIN_TENSORS,
    SEQUENCES,
    SPARSE,
    Args,
    Kwargs,
    floating_in,
    is_floating,
    leaves,
    map_tensors,
    tensors_in,
    with_items,
)
from .nodes import edges_of, is_leaf, node_of
from .outputs import Opaque, Part, floating_parts, parts_of
from .structures import copied, floats_of, is_dense, map_all, tensors_of, widened

__all__ = [
    "CAST",
    "COMPUTED",
    "ELIGIBLE",
    "LOW_DTYPES",
    "LOW_PRECISION",
    "NUMBERS",
    "PLAIN_TENSORS",
    "SEQUENCES",
    "SPARSE",
    "Args",
    "Constant",
    "Kwargs",
    "Named",
    "Opaque",
    "Part",
    "cast_any_layout",
    "cast_as_one",
    "chunk_of",
    "copied",
    "default_device_types",
    "edges_of",
    "floating_in",
    "floating_parts",
    "floats_of",
    "is_available",
    "is_dense",
    "is_floating",
    "is_in_memory",
    "is_leaf",
    "is_low",
    "is_present",
    "leaves",
    "long_name",
    "map_all",
    "map_tensors",
    "node_of",
    "parse_device_type",
    "parse_device_types",
    "parse_name",
    "parts_of",
    "short_name",
    "tensors_in",
    "tensors_of",
    "widened",
    "with_items",
]
