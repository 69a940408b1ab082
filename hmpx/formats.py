"""Number formats: define one, register it, round tensors to it, and store them in its codes.

The public menu, ``hmpx.formats``; holds nothing of its own.
"""

from __future__ import annotations

from .compute import create_lower_func, register_op, unregister
from .number_formats import (
    Block,
    Custom,
    Exponent,
    Fixed,
    Float,
    Posit,
    Scaled,
    Table,
    decode,
    encode,
    get,
    names,
    quantize,
    register,
)

__all__ = [
    "Block",
    "Custom",
    "Exponent",
    "Fixed",
    "Float",
    "Posit",
    "Scaled",
    "Table",
    "create_lower_func",
    "decode",
    "encode",
    "get",
    "names",
    "quantize",
    "register",
    "register_op",
    "unregister",
]
