"""Posits and takums: floating point with tapered precision.

The farther an exponent is from 0, the fewer mantissa bits a code has. After the sign, a code has a
prefix for the part of the range, and as many of the number's next bits as fit. Families define how many.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

import torch
from torch import Tensor

from ...errors import OptionError
from ..bits import FP64, Binary, may_grow, ones_if_positive, uniform
from ..unpatched import ADD, AND, CLAMP, DIV, EQ, GE, GT, LEFT, LT, OR, RIGHT, SUB, WHERE, XOR
from ..vocabulary import Overflow
from .number_format import CodedFormat, Coding, Figures, Kernel, check_int, check_name, kernel_of

#: Bits of a takum's code before the characteristic: the sign, its direction, and three for its length.
_HEADER: Final = 5

#: Bits of the longest characteristic.
_LONGEST: Final = 7

#: The exponents, which are the characteristics of positive numbers, are from -255 to 254.
_RANGE: Final = 255


class TaperedParams(NamedTuple):
    """The numbers with which posits and takums are rounded."""

    binary: Binary
    mode: str
    least: int  # the bits of the smallest positive number
    most: int  # the bits of the largest number
    last: int  # the largest bits of a number that doesn't become NaR (NaN)
    parity: int  # gives the place above the mantissa the parity of a code that ends there


class Tapered(CodedFormat):
    """A format with tapered precision; negative numbers are two's complements, the lowest code is NaR."""

    default_overflow: ClassVar[Overflow] = "nan"  # for infinities; numbers always saturate

    if (
        TYPE_CHECKING
    ):  # with the size of a mantissa; ``scaled``: positive numbers' bits minus those of 1.0

        def _dropped(self, scaled: Tensor, mantissa: int) -> Tensor: ...  # how many low bits
        def _parity(self, mantissa: int) -> int: ...
        def _coded(self, scaled: Tensor, mantissa: int) -> Tensor: ...  # codes
        def _read(
            self, codes: Tensor
        ) -> Tensor: ...  # ``scaled`` in float64, from codes without sign

    def params_in(self, binary: Binary, mode: str, overflow: Overflow) -> TaperedParams:
        return TaperedParams(
            binary,
            mode,
            least=binary.bits_of(self.smallest_normal),
            most=binary.bits_of(self.max),
            last=binary.infinity - (overflow != "saturate"),
            parity=self._parity(binary.mantissa),
        )

    def round(self, x: Tensor, noise: Tensor | None, p: TaperedParams) -> Tensor:
        """Cuts exponent and mantissa to the bits that a code has for them."""
        binary, start = p.binary, p.binary.bias << p.binary.mantissa
        bits = x.view(binary.integer)
        whole = AND(bits, binary.magnitude)
        scaled = CLAMP(whole, p.least, p.most).sub_(start)
        shift = self._dropped(scaled, binary.mantissa)
        unit = LEFT(1, shift)
        if p.mode == "nearest":
            is_odd = RIGHT(ADD(scaled, p.parity), shift).bitwise_and_(1)
            added = RIGHT(unit, 1).sub_(1).add_(is_odd).add_(scaled)
        elif p.mode == "nearest_away":
            added = RIGHT(unit, 1).add_(scaled)
        elif p.mode in ("up", "down"):
            grows = may_grow(bits, p.mode)
            added = WHERE(grows, ADD(scaled, unit).sub_(1), scaled)
        else:
            added = scaled
        rounded = CLAMP(AND(added, -unit).add_(start), max=p.most)
        if p.mode not in ("nearest", "nearest_away"):  # only these two never round to zero
            is_tiny = LT(whole, p.least)
            if p.mode in ("up", "down"):
                is_tiny = AND(is_tiny, ~grows)
            below = rounded.masked_fill(is_tiny, 0)
            if p.mode == "stochastic":
                assert noise is not None
                above = WHERE(is_tiny, p.least, ADD(rounded, unit))
                low, high = below.view(binary.dtype), above.view(binary.dtype)
                magnitude = CLAMP(whole, max=p.most).view(binary.dtype)
                share = DIV(SUB(magnitude, low), SUB(high, low))
                below = WHERE(GE(share, uniform(noise, binary)), above, below)
            rounded = below
        rounded = AND(rounded, ones_if_positive(whole, binary))
        is_nan = ones_if_positive(SUB(whole, p.last), binary)
        rounded = rounded.bitwise_or_(is_nan.bitwise_and_(binary.nan))
        sign = AND(bits, binary.sign).bitwise_and_(ones_if_positive(rounded, binary))
        return rounded.bitwise_or_(sign).view(binary.dtype)

    def codes_of(self, rounded: Tensor, binary: Binary) -> Tensor:
        bits = rounded.view(binary.integer)
        whole = AND(bits, binary.magnitude)
        codes = self._coded(SUB(whole, binary.bias << binary.mantissa), binary.mantissa)
        codes = WHERE(LT(bits, 0), -codes, codes).to(torch.int64)
        codes = codes.bitwise_and_((1 << self.bits) - 1).masked_fill_(EQ(whole, 0), 0)
        return codes.masked_fill_(GT(whole, binary.infinity), 1 << (self.bits - 1))

    def values_of(self, codes: Tensor) -> Tensor:
        codes = AND(codes, (1 << self.bits) - 1)
        sign = RIGHT(codes, self.bits - 1)
        whole = AND(WHERE(EQ(sign, 1), -codes, codes), (1 << (self.bits - 1)) - 1)
        values = ADD(self._read(whole), FP64.bias << FP64.mantissa).view(torch.float64)
        values = WHERE(EQ(sign, 1), -values, values)
        values = values.masked_fill_(EQ(codes, 0), 0.0)
        return values.masked_fill_(EQ(codes, 1 << (self.bits - 1)), math.nan)


@dataclass(frozen=True)
class Posit(Tapered):
    """A posit, as in the 2022 standard, which fixes ``es`` at 2; other sizes were used before.

    Attributes:
        name: An identifier.
        bits: Bits of a code.
        es: Bits of the exponent field.

    Example:
        >>> posit6 = hmpx.formats.Posit("posit6", bits=6, es=2)
        >>> hmpx.formats.quantize(torch.tensor([1.1, 100.0, 1e9]), posit6)
        tensor([1.0000e+00, 1.2800e+02, 6.5536e+04])
    """

    bits: int
    es: int

    def __post_init__(self) -> None:
        check_name(self.name)
        check_int(self.name, "bits", self.bits, 3, 32)
        check_int(self.name, "es", self.es, 0, 8)
        if self.max_exponent > 1000:
            raise OptionError(
                f"format {self.name}: its largest value, 2**{self.max_exponent}, is beyond float64, "
                "in which formats are computed; take fewer bits or a smaller es"
            )

    @property
    def max_exponent(self) -> int:
        """The exponent of the largest number; that of the smallest is its negative."""
        return (self.bits - 2) << self.es

    @property
    def _figures(self) -> Figures:
        kept = self.bits - 3 - self.es
        epsilon = math.ldexp(1.0, -kept) if kept >= 0 else math.ldexp(1.0, 1 << -kept) - 1.0
        least = math.ldexp(1.0, -self.max_exponent)
        return Figures(max(kept, 0) + 1, epsilon, math.ldexp(1.0, self.max_exponent), least, least)

    @property
    def fits_in_float32(self) -> bool:
        return self.bits - 3 - self.es <= 22 and self.max_exponent <= 125

    def _parity(self, mantissa: int) -> int:
        # The longest regimes are bits - 3 and 2 - bits: numbers above 1 end in 0, others in 1.
        return 1 << (mantissa + self.es) if self.bits % 2 == 0 else 0

    def _dropped(self, scaled: Tensor, mantissa: int) -> Tensor:
        places = mantissa + self.es
        length = CLAMP(_folded(RIGHT(scaled, places)), max=self.bits - 3)
        return length.add_(places + 3 - self.bits)

    def kernel(self, p: TaperedParams) -> Kernel:
        return kernel_of("posit", p, self.bits, self.es, p.least, p.most, p.parity, p.last)

    def _coded(self, scaled: Tensor, mantissa: int) -> Tensor:
        most, places = self.max_exponent << mantissa, mantissa + self.es
        scaled = scaled.clamp_(-most, most)
        regime = RIGHT(scaled, places)
        kept = SUB(self.bits - 3, _folded(regime)).clamp_(min=0)
        # 1...10 above 1, 0...01 below
        run = WHERE(LT(regime, 0), 1, SUB(LEFT(1, CLAMP(ADD(regime, 2), min=0)), 2))
        rest = RIGHT(AND(scaled, (1 << places) - 1), SUB(places, kept))
        codes = OR(LEFT(run, kept), rest)
        return codes.masked_fill_(EQ(regime, self.bits - 2), (1 << (self.bits - 1)) - 1)

    def _read(self, codes: Tensor) -> Tensor:
        bits, places = self.bits, FP64.mantissa + self.es
        lead = RIGHT(codes, bits - 2)
        # The run of leading bits ends at the highest bit that differs from the first.
        differing = WHERE(EQ(lead, 1), XOR(codes, (1 << (bits - 1)) - 1), codes)
        highest = RIGHT(differing.to(torch.float64).view(torch.int64), FP64.mantissa)
        highest = WHERE(EQ(differing, 0), -1, SUB(highest, FP64.bias))
        run = SUB(bits - 2, highest)
        regime = WHERE(EQ(lead, 1), SUB(run, 1), -run)
        left = CLAMP(highest, min=0)
        rest = AND(codes, SUB(LEFT(1, left), 1))
        # Missing exponent bits are zeros.
        return ADD(LEFT(regime, places), LEFT(rest, SUB(places, left)))

    def coding(self, binary: Binary) -> Coding:
        spec = struct.pack("3q", self.bits, self.es, self.max_exponent)
        return Coding("posit", spec, can_decode=self.bits <= binary.mantissa + 2)


@dataclass(frozen=True)
class Takum(Tapered):
    """A linear takum (Hunhold, "Beating Posits at Their Own Game: Takum Arithmetic", 2024).

    Exponents are from -255 to 254 for any width, so float32 does not hold all values.

    Attributes:
        name: An identifier.
        bits: Bits of a code; at least 12, so that every exponent fits.

    Example:
        >>> takum12 = hmpx.formats.Takum("takum12", bits=12)
        >>> hmpx.formats.quantize(torch.tensor([1.01, 3.3, 1e9]), takum12)
        tensor([1.0078e+00, 3.3125e+00, 1.0066e+09])
    """

    bits: int

    def __post_init__(self) -> None:
        check_name(self.name)
        check_int(self.name, "bits", self.bits, _HEADER + _LONGEST, 32)

    @property
    def _figures(self) -> Figures:
        step = math.ldexp(1.0, _HEADER + _LONGEST - self.bits)
        most = math.ldexp(2.0 - step, _RANGE - 1)
        least = math.ldexp(1.0 + step, -_RANGE)
        kept = self.bits - _HEADER
        return Figures(kept + 1, math.ldexp(1.0, -kept), most, least, least)

    fits_in_float32 = False

    def _parity(self, mantissa: int) -> int:
        return 1 << mantissa  # that of a characteristic's end, which is that of c + 1

    def _dropped(self, scaled: Tensor, mantissa: int) -> Tensor:
        return ADD(_length_of(RIGHT(scaled, mantissa)), mantissa + _HEADER - self.bits)

    def kernel(self, p: TaperedParams) -> Kernel:
        return kernel_of("takum", p, self.bits, p.least, p.most, p.last)

    def _coded(self, scaled: Tensor, mantissa: int) -> Tensor:
        exponent = RIGHT(scaled, mantissa).clamp_(-_RANGE, _RANGE - 1)
        length = _length_of(exponent)
        is_below = LT(exponent, 0)
        # For negative exponents the three bits are the complement of the length.
        header = WHERE(is_below, SUB(_LONGEST, length), ADD(length, _LONGEST + 1))
        left = SUB(self.bits - _HEADER, length)
        characteristic = OR(LEFT(header, length), SUB(exponent, _first(length, is_below)))
        rest = RIGHT(AND(scaled, (1 << mantissa) - 1), SUB(mantissa, left))
        return OR(LEFT(characteristic, left), rest)

    def _read(self, codes: Tensor) -> Tensor:
        kept = self.bits - _HEADER
        header = RIGHT(codes, kept)
        is_below = LT(header, _LONGEST + 1)
        length = WHERE(is_below, SUB(_LONGEST, header), SUB(header, _LONGEST + 1))
        rest = LEFT(AND(codes, (1 << kept) - 1), ADD(length, FP64.mantissa - kept))
        return ADD(LEFT(_first(length, is_below), FP64.mantissa), rest)


def _folded(exponent: Tensor) -> Tensor:
    """Returns k for k and -k - 1, whose codes have prefixes of equal length."""
    return XOR(exponent, RIGHT(exponent, 31))


def _length_of(exponent: Tensor) -> Tensor:
    """Returns the number of bits, 0 to 7, of an exponent from -255 to 254 in a takum's code."""
    near = ADD(_folded(exponent), 1)  # the bits of c are those of c + 1 without the leading one
    length = GE(near, 2).to(near.dtype)
    for power in range(2, _LONGEST + 1):
        length = length.add_(GE(near, 1 << power))
    return length


def _first(length: Tensor, is_below: Tensor) -> Tensor:
    """Returns the least exponent with this number of bits in a takum's code, below 0 or not."""
    return WHERE(is_below, SUB(1, LEFT(2, length)), SUB(LEFT(1, length), 1))
