"""Takums: floating point whose precision tapers off, with a range that hardly depends on the width."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from ..bits import FP64, Binary
from ..layouts import NO_GRID, Grid
from ..modes import Overflow
from ..plans import Plan
from ..unpatched import ADD, AND, EQ, GE, GT, LEFT, LT, OR, RIGHT, SUB, WHERE, XOR
from .number_format import CodedFormat, check_int, check_name
from .tapered import TaperedPlan

#: Bits of a code before the characteristic: the sign, its direction and the three of its length.
_HEADER: Final = 5

#: Bits of the longest characteristic.
_LONGEST: Final = 7

#: The exponents, which are the characteristics of positive numbers, are from -255 to 254.
_RANGE: Final = 255


@dataclass(frozen=True)
class TakumPlan(TaperedPlan):
    """Takums: the further an exponent is from 0, the fewer bits of the mantissa are left."""

    kernel = "takum"
    kernel_binaries = (FP64,)
    has_encoder = False

    @property
    def least(self) -> int:
        """The bits of the smallest positive number: 1 as code, as 0 is taken."""
        left = self.bits - _HEADER - _LONGEST
        start = (self.binary.bias - _RANGE) << self.binary.mantissa
        return start + (1 << (self.binary.mantissa - left))

    @property
    def most(self) -> int:
        """The bits of the largest number."""
        left = self.bits - _HEADER - _LONGEST
        end = (self.binary.bias + _RANGE) << self.binary.mantissa
        return end - (1 << (self.binary.mantissa - left))

    @property
    def parity(self) -> int:
        """What makes the place above the mantissa as odd as the end of a characteristic, which is that of c + 1."""
        return 1 << self.binary.mantissa

    def cut(self, scaled: Tensor) -> Tensor:
        """Returns how many bits of numbers a code has no room for; of their bits less those of 1."""
        mantissa = self.binary.mantissa
        return ADD(_length_of(RIGHT(scaled, mantissa)), mantissa + _HEADER - self.bits)

    def kernel_spec(self, grid: Grid = NO_GRID) -> Any:
        """Returns the kernel's ``takum_spec``."""
        return (ctypes.c_int64 * 5)(self.mode_number, self.bits, self.least, self.most, self.last)


@dataclass(frozen=True)
class Takum(CodedFormat):
    """A linear takum (Hunhold, "Beating Posits at Their Own Game: Takum Arithmetic", 2024).

    After the sign, a bit and three more say how many bits (0 to 7) of the exponent follow, the rest are
    the mantissa's. Negative numbers are two's complements, 0 is 0, and NaR stands for what is no number.
    Exponents are from -255 to 254 whatever the width, so float32 has not all values.

    Attributes:
        name: An identifier.
        bits: Bits of a code; at least 12, in which every exponent has room.

    Example:
        >>> takum12 = hmpx.formats.Takum("takum12", bits=12)
        >>> hmpx.formats.quantize(torch.tensor([1.01, 3.3, 1e9]), takum12)
        tensor([1.0078e+00, 3.3125e+00, 1.0066e+09])
    """

    name: str
    bits: int

    plans = (TakumPlan,)

    def __post_init__(self) -> None:
        """Checks the fields.

        Raises:
            OptionError: A field has a value that it can't have.
        """
        check_name(self.name)
        check_int(self.name, "bits", self.bits, _HEADER + _LONGEST, 32)

    @property
    def significand_bits(self) -> int:
        """Bits of the significand between 1 and 2, where most are left, the leading 1 included."""
        return self.bits - _HEADER + 1

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next larger number."""
        return math.ldexp(1.0, _HEADER - self.bits)

    @property
    def max(self) -> float:
        """The largest number."""
        left = self.bits - _HEADER - _LONGEST
        return math.ldexp(2.0 - math.ldexp(1.0, -left), _RANGE - 1)

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number: takums have no subnormals."""
        left = self.bits - _HEADER - _LONGEST
        return math.ldexp(1.0 + math.ldexp(1.0, -left), -_RANGE)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive number."""
        return self.smallest_normal

    # --- rounding ------------------------------------------------------------------------------

    @property
    def default_overflow(self) -> Overflow:
        """What infinities become unless something else is asked for; numbers always saturate."""
        return "nan"

    @property
    def fits_in_float32(self) -> bool:
        """Whether float32 has room for all values, and for what rounding adds to them."""
        return False

    @property
    def is_exact_in_float32(self) -> bool:
        """Whether every value is one of float32."""
        return False

    def plan_in(self, binary: Binary, mode: str, overflow: Overflow) -> Plan:
        """Returns how to round tensors of a binary type that the format fits in."""
        return TakumPlan(binary, mode, self.bits, overflow != "saturate")

    # --- codes ---------------------------------------------------------------------------------

    def codes_of(self, rounded: Tensor, binary: Binary) -> Tensor:
        """Returns the codes of values of the format, as integers of any width."""
        bits = rounded.to(torch.float64).view(torch.int64)
        whole = AND(bits, FP64.magnitude)
        exponent = SUB(RIGHT(whole, FP64.mantissa), FP64.bias).clamp_(-_RANGE, _RANGE - 1)
        length = _length_of(exponent)
        is_below = LT(exponent, 0)
        # Of negative exponents the three bits are the complement of the length.
        header = WHERE(is_below, SUB(_LONGEST, length), ADD(length, _LONGEST + 1))
        first = _first(length, is_below)
        left = SUB(self.bits - _HEADER, length)
        mantissa = RIGHT(AND(whole, (1 << FP64.mantissa) - 1), SUB(FP64.mantissa, left))
        codes = LEFT(OR(LEFT(header, length), SUB(exponent, first)), left)
        codes = OR(codes, mantissa)
        codes = WHERE(LT(bits, 0), -codes, codes)
        codes = codes.bitwise_and_((1 << self.bits) - 1).masked_fill_(EQ(whole, 0), 0)
        return codes.masked_fill_(GT(whole, FP64.infinity), 1 << (self.bits - 1))

    def values_of(self, codes: Tensor) -> Tensor:
        """Returns the values of int64 codes, in float64."""
        bits = self.bits
        codes = AND(codes, (1 << bits) - 1)
        sign = RIGHT(codes, bits - 1)
        whole = AND(WHERE(EQ(sign, 1), -codes, codes), (1 << (bits - 1)) - 1)
        header = RIGHT(whole, bits - _HEADER)
        is_below = LT(header, _LONGEST + 1)
        length = WHERE(is_below, SUB(_LONGEST, header), SUB(header, _LONGEST + 1))
        first = _first(length, is_below)
        left = SUB(bits - _HEADER, length)
        rest = AND(whole, (1 << (bits - _HEADER)) - 1)
        exponent = ADD(first, RIGHT(rest, left))
        mantissa = LEFT(AND(rest, SUB(LEFT(1, left), 1)), SUB(FP64.mantissa, left))
        values = OR(LEFT(ADD(exponent, FP64.bias), FP64.mantissa), mantissa).view(torch.float64)
        values = WHERE(EQ(sign, 1), -values, values)
        values = values.masked_fill_(EQ(codes, 0), 0.0)
        return values.masked_fill_(EQ(codes, 1 << (bits - 1)), math.nan)


def _length_of(exponent: Tensor) -> Tensor:
    """Returns how many bits of a code an exponent from -255 to 254 takes: 0 to 7."""
    # c and -c - 1 take equally many: those of c + 1 without the leading one.
    near = ADD(XOR(exponent, RIGHT(exponent, 63)), 1)
    length = GE(near, 2).to(near.dtype)
    for power in range(2, _LONGEST + 1):
        length = length.add_(GE(near, 1 << power))
    return length


def _first(length: Tensor, is_below: Tensor) -> Tensor:
    """Returns the least exponent that takes so many bits of a code, below 0 or not."""
    return WHERE(is_below, SUB(1, LEFT(2, length)), SUB(LEFT(1, length), 1))
