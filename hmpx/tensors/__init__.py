"""Tensors as values: dtypes and devices, lists of tensors, chunks of memory, constants."""

from __future__ import annotations

from .chunks import cast_any_layout, cast_as_one, chunk_of, is_in_memory
from .dtypes import (
    CAST,
    COMPUTED,
    DEVICE_TYPES,
    ELIGIBLE,
    LOW_DTYPES,
    LOW_PRECISION,
    HasName,
    default_device_types,
    is_available,
    is_captured,
    is_low,
    is_present,
    long_name,
    parse_device_type,
    parse_device_types,
    parse_name,
    promoted,
    short_name,
)
from .nested import (
    NUMBERS,
    PLAIN_TENSORS,
    SEQUENCES,
    SPARSE,
    Args,
    Constant,
    Kwargs,
    edges_of,
    floating_in,
    is_floating,
    is_leaf,
    leaves,
    map_tensors,
    node_of,
    tensors_in,
    version_of,
    with_items,
)
from .structures import (
    Opaque,
    Part,
    copied,
    floating_parts,
    floats_of,
    is_dense,
    map_all,
    parts_of,
    stored_parameters,
    tensors_of,
    widened,
)
