"""Binary floating-point types: their bit fields, and arithmetic on their bits."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

import torch
from torch import Tensor

from .unpatched import GE, LT


@dataclass(frozen=True)
class Binary:
    """A binary floating type for computation, and its bit fields.

    Attributes:
        dtype: The floating type.
        integer: The integer type of the same width.
        mantissa: Bits of the mantissa field.
        bias: The offset of the exponent field.
    """

    dtype: torch.dtype
    integer: torch.dtype
    mantissa: int
    bias: int

    @property
    def width(self) -> int:
        """The total number of bits."""
        return 32 if self.mantissa == 23 else 64

    @property
    def sign(self) -> int:
        """The sign bit, as a signed integer."""
        return ~self.magnitude

    @property
    def magnitude(self) -> int:
        """All bits except the sign."""
        return (1 << (self.width - 1)) - 1

    @property
    def infinity(self) -> int:
        """The bits of infinity, equal to those of the exponent field."""
        return self.magnitude & -(1 << self.mantissa)

    @property
    def nan(self) -> int:
        """The bits of a NaN."""
        return self.infinity | (1 << (self.mantissa - 1))

    def bits_of(self, value: float) -> int:
        """Returns the bits of a non-negative value."""
        pack, unpack = ("<f", "<i") if self.mantissa == 23 else ("<d", "<q")
        found: int = struct.unpack(unpack, struct.pack(pack, value))[0]
        return found

    def floor(self, value: Fraction) -> float:
        """Returns the largest number of this type that is not above ``value``."""
        near = float(value) if self.mantissa == 52 else to_float32(float(value))
        while Fraction(near) > value:
            near = self.before(near)
        return near

    def before(self, value: float) -> float:
        """Returns the next number towards minus infinity."""
        if self.mantissa == 52:
            return math.nextafter(value, -math.inf)
        bits = self.bits_of(abs(value))
        if value == 0:
            return -_from_bits32(1)
        return _from_bits32(bits - 1) if value > 0 else -_from_bits32(bits + 1)


FP32: Final = Binary(torch.float32, torch.int32, 23, 127)
FP64: Final = Binary(torch.float64, torch.int64, 52, 1023)


def ones_if_positive(number: Tensor, binary: Binary) -> Tensor:
    """Returns -1 where an integer is positive, else 0."""
    return number.neg().bitwise_right_shift_(binary.width - 1)


def may_grow(bits: Tensor, mode: str) -> Tensor:
    """Returns whether rounding ``"up"`` or ``"down"`` may increase the magnitude of a number."""
    return GE(bits, 0) if mode == "up" else LT(bits, 0)


def to_float32(value: float) -> float:
    """Returns the float32 nearest to ``value``, which must be in range."""
    found: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return found


def _from_bits32(bits: int) -> float:
    found: float = struct.unpack("<f", struct.pack("<i", bits))[0]
    return found
