"""How the codes of a format are made and read by compiled kernels.

What a family knows of it is a `Coding`, which `kernels.calls` passes on.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Coding:
    """What the kernels are told that make codes of values of one binary type, or values of codes.

    Attributes:
        kernel: The kind of codes, by whose name the decoding kernel goes.
        spec: The kernel's ``KIND_codes``.
        can_encode: Whether there is a kernel that makes such codes.
        can_decode: Whether there is one that reads them.
        memory: What the spec points to.
    """

    kernel: str
    spec: Any
    can_encode: bool = True
    can_decode: bool = True
    memory: Any = None


class FixedCodes(ctypes.Structure):
    """The kernels' ``fixed_codes``."""

    _fields_ = (("bits", ctypes.c_int64), ("scale", ctypes.c_double), ("step", ctypes.c_double))


class TableCodes(ctypes.Structure):
    """The kernels' ``table_codes``."""

    _fields_ = (("mask", ctypes.c_int64), ("values", ctypes.c_void_p))


def integers(*numbers: int) -> Any:
    """Returns numbers as kernels take them; those beyond 63 bits are taken for their lowest 64."""
    return (ctypes.c_int64 * len(numbers))(*(ctypes.c_int64(number).value for number in numbers))
