"""Fixed point; powers of two, such as the E8M0 scales of blocks."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

import torch
from torch import Tensor

from ...errors import OptionError
from ..bits import FP64, Binary, uniform
from ..unpatched import (
    ABS,
    ADD,
    AND,
    CLAMP,
    EQ,
    FLOOR,
    GE,
    GT,
    LE,
    LEFT,
    LT,
    MUL,
    OR,
    RIGHT,
    SUB,
    TRUNC,
    WHERE,
)
from ..vocabulary import ROUNDING_MODES, Overflow
from .floats import cut
from .number_format import CodedFormat, Coding, Figures, Kernel, check_int, check_name

_IN_PLACE: Final = {
    "nearest": Tensor.round_,
    "toward_zero": Tensor.trunc_,
    "up": Tensor.ceil_,
    "down": Tensor.floor_,
}


class FixedParams(NamedTuple):
    """The numbers with which fixed point is rounded."""

    binary: Binary
    mode: str
    scale: float  # the inverse of the last place
    least: int  # in units of the last place
    most: int


@dataclass(frozen=True)
class Fixed(CodedFormat):
    """Fixed point in two's complement: multiples of ``2**-fraction_bits``.

    Attributes:
        name: An identifier.
        integer_bits: Bits before the point, including the sign.
        fraction_bits: Bits after it.

    Example:
        >>> q2_2 = hmpx.formats.Fixed("q2_2", integer_bits=2, fraction_bits=2)
        >>> hmpx.formats.quantize(torch.tensor([0.3, -1.9, 5.0]), q2_2)
        tensor([ 0.2500, -2.0000,  1.7500])
    """

    integer_bits: int
    fraction_bits: int

    def __post_init__(self) -> None:
        check_name(self.name)
        check_int(self.name, "integer_bits", self.integer_bits, 1, 32)
        check_int(self.name, "fraction_bits", self.fraction_bits, 0, 31)
        if not 2 <= self.bits <= 32:
            raise OptionError(
                f"format {self.name}: integer_bits and fraction_bits must be 2 to 32 in all, "
                f"not {self.bits}"
            )

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.integer_bits + self.fraction_bits

    @property
    def _figures(self) -> Figures:
        step = math.ldexp(1.0, -self.fraction_bits)
        return Figures(self.bits - 1, step, ((1 << (self.bits - 1)) - 1) * step, step, step)

    @property
    def min(self) -> float:
        """The least number, one step farther from zero than the largest."""
        return -math.ldexp(1.0, self.integer_bits - 1)

    @property
    def fits_in_float32(self) -> bool:
        return self.is_exact_in_float32

    def params_in(self, binary: Binary, mode: str, overflow: Overflow) -> FixedParams:
        half = 1 << (self.bits - 1)
        return FixedParams(binary, mode, scale=1 / self.epsilon, least=-half, most=half - 1)

    def round(self, x: Tensor, noise: Tensor | None, p: FixedParams) -> Tensor:
        scaled = MUL(x, p.scale)
        if p.mode in _IN_PLACE:
            whole = _IN_PLACE[p.mode](scaled)
        elif p.mode == "nearest_away":
            whole = TRUNC(scaled)
            is_half = GE(ABS(SUB(scaled, whole)), 0.5)
            away = WHERE(LT(scaled, 0), SUB(whole, 1.0), ADD(whole, 1.0))
            whole = WHERE(is_half, away, whole)
        else:
            assert noise is not None
            whole = FLOOR(scaled)
            is_drawn = GE(SUB(scaled, whole), uniform(noise, p.binary))
            whole = WHERE(is_drawn, ADD(whole, 1.0), whole)
        whole = CLAMP(whole, p.least, p.most).mul_(1 / p.scale)
        bits = whole.view(p.binary.integer)  # compilers may treat -0 as 0
        return bits.masked_fill_(EQ(whole, 0), 0).view(p.binary.dtype)

    def kernel(self, p: FixedParams) -> Kernel:
        numbers = p.scale, 1 / p.scale, p.least, p.most
        return Kernel("fixed", struct.pack("q4d", ROUNDING_MODES.index(p.mode), *numbers))

    def codes_of(self, rounded: Tensor, binary: Binary) -> Tensor:
        codes = MUL(rounded, 1 / self.epsilon).nan_to_num_(nan=0.0).to(torch.int64)
        return codes.bitwise_and_((1 << self.bits) - 1)

    def values_of(self, codes: Tensor) -> Tensor:
        half = 1 << (self.bits - 1)
        signed = SUB(AND(ADD(codes, half), 2 * half - 1), half)
        return MUL(signed.to(torch.float64), self.epsilon)

    def coding(self, binary: Binary) -> Coding:
        return Coding("fixed", struct.pack("q2d", self.bits, 1 / self.epsilon, self.epsilon))


class ExponentParams(NamedTuple):
    """The numbers with which powers of two are rounded, in the bits of float64."""

    binary: Binary
    mode: str
    least: int  # the bits of the smallest number
    most: int  # the bits of the largest number
    beyond: int  # the bits that replace numbers beyond that: NaN or the largest


@dataclass(frozen=True)
class Exponent(CodedFormat):
    """Powers of two, without sign or zero: a code is the exponent plus the bias; the last code is NaN.

    For scales of blocks. Zero and negative numbers become NaN; smaller numbers become the smallest.

    Attributes:
        name: An identifier.
        bits: Bits of a code.
        bias: The offset of stored exponents; None: ``2**(bits - 1) - 1``.

    Example:
        >>> e5m0 = hmpx.formats.Exponent("e5m0", bits=5)
        >>> hmpx.formats.quantize(torch.tensor([1.4, 1.5, 1e-9, -1.0]), e5m0)
        tensor([1.0000e+00, 2.0000e+00, 3.0518e-05,        nan])
    """

    bits: int
    bias: int | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        check_int(self.name, "bits", self.bits, 2, 10)
        if self.bias is not None:
            check_int(self.name, "bias", self.bias, -1023, 1022)
        if self.max_exponent > 1023:
            raise OptionError(
                f"format {self.name}: exponents from {-self.exponent_bias} to {self.max_exponent} are "
                "beyond float64, in which formats are computed; take fewer bits or another bias"
            )

    @property
    def exponent_bias(self) -> int:
        """The offset of stored exponents."""
        return (1 << (self.bits - 1)) - 1 if self.bias is None else self.bias

    @property
    def max_exponent(self) -> int:
        """The exponent of the largest number."""
        return (1 << self.bits) - 2 - self.exponent_bias

    @property
    def _figures(self) -> Figures:
        least = math.ldexp(1.0, -self.exponent_bias)
        return Figures(1, 1.0, math.ldexp(1.0, self.max_exponent), least, least)

    allowed_overflow: ClassVar[tuple[Overflow, ...]] = ("nan", "saturate")
    default_overflow: ClassVar[Overflow] = "nan"
    fits_in_float32 = False  # the smallest of E8M0 is subnormal there

    def params_in(self, binary: Binary, mode: str, overflow: Overflow) -> ExponentParams:
        # Of two adjacent powers of two the larger one is even: in units of the smaller it is 2.
        mode = "nearest_away" if mode == "nearest" else mode
        least, most = binary.bits_of(self.smallest_normal), binary.bits_of(self.max)
        return ExponentParams(binary, mode, least, most, binary.nan if overflow == "nan" else most)

    def round(self, x: Tensor, noise: Tensor | None, p: ExponentParams) -> Tensor:
        binary = p.binary
        bits = x.view(binary.integer)
        rounded = cut(bits, bits, binary.mantissa, noise, p)
        if p.mode in ("down", "toward_zero"):  # only infinity is beyond the largest
            is_over = GT(bits, binary.infinity - 1)
        else:
            is_over = GT(rounded, p.most)
        rounded = CLAMP(rounded, p.least, p.most).masked_fill_(is_over, p.beyond)
        is_no_power = OR(LE(bits, 0), GT(bits, binary.infinity))
        return rounded.masked_fill_(is_no_power, binary.nan).view(binary.dtype)

    def codes_of(self, rounded: Tensor, binary: Binary) -> Tensor:
        bits = rounded.to(torch.float64).view(torch.int64)
        codes = SUB(RIGHT(bits, FP64.mantissa), FP64.bias - self.exponent_bias)
        return WHERE(LT(bits, FP64.infinity), codes, (1 << self.bits) - 1)

    def values_of(self, codes: Tensor) -> Tensor:
        codes = AND(codes, (1 << self.bits) - 1)
        fields = LEFT(ADD(codes, FP64.bias - self.exponent_bias), FP64.mantissa)
        values = fields.view(torch.float64)
        return values.masked_fill_(EQ(codes, (1 << self.bits) - 1), math.nan)
