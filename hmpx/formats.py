"""Number formats: define one, register it, round tensors to it, measure the error, store them as codes.

The public namespace ``hmpx.formats``; defines nothing itself.
"""

from __future__ import annotations

from .comparing import ErrorStatistics, ErrorTable, error, plot, table
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
    Takum,
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
    "ErrorStatistics",
    "ErrorTable",
    "Exponent",
    "Fixed",
    "Float",
    "Posit",
    "Scaled",
    "Table",
    "Takum",
    "create_lower_func",
    "decode",
    "encode",
    "error",
    "get",
    "names",
    "plot",
    "quantize",
    "register",
    "register_op",
    "table",
    "unregister",
]
