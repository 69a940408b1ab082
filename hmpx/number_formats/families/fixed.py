"""Fixed point."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from ...errors import OptionError
from ..bits import FP64, Binary, uniform, wide
from ..plans import NO_GRID, Coding, Grid, Plan, struct
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
from ..vocabulary import Overflow
from .number_format import CodedFormat, Figures, check_int, check_name

_IN_PLACE: Final = {
    "nearest": Tensor.round_,
    "toward_zero": Tensor.trunc_,
    "up": Tensor.ceil_,
    "down": Tensor.floor_,
}

#: The kernel's ``fixed_spec``.
FixedSpec: Final = struct(("mode", ctypes.c_int64), ("scale step least most", ctypes.c_double))

#: The kernels' ``fixed_codes``.
_FixedCodes: Final = struct(("bits", ctypes.c_int64), ("scale step", ctypes.c_double))


@dataclass(frozen=True)
class FixedPlan(Plan):
    """Rounds to fixed point with a number of fraction bits, within bounds in units of the last place."""

    fraction: int
    least: int
    most: int

    kernel = "fixed"

    def round(self, x: Tensor, noise: Tensor | None) -> Tensor:
        scaled = MUL(x, math.ldexp(1.0, self.fraction))
        if self.mode in _IN_PLACE:
            whole = _IN_PLACE[self.mode](scaled)
        elif self.mode == "nearest_away":
            whole = TRUNC(scaled)
            is_half = GE(ABS(SUB(scaled, whole)), 0.5)
            away = WHERE(LT(scaled, 0), SUB(whole, 1.0), ADD(whole, 1.0))
            whole = WHERE(is_half, away, whole)
        else:
            assert noise is not None
            whole = FLOOR(scaled)
            is_drawn = GE(SUB(scaled, whole), uniform(noise, self.binary))
            whole = WHERE(is_drawn, ADD(whole, 1.0), whole)
        whole = CLAMP(whole, self.least, self.most).mul_(math.ldexp(1.0, -self.fraction))
        bits = whole.view(self.binary.integer)  # compilers may treat -0 as 0
        return bits.masked_fill_(EQ(whole, 0), 0).view(self.binary.dtype)

    def kernel_spec(self, grid: Grid = NO_GRID) -> Any:
        scale = 1 << self.fraction
        return FixedSpec(self.mode_number, scale, 1 / scale, self.least, self.most)


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

    def plan_in(self, binary: Binary, mode: str, overflow: Overflow) -> FixedPlan:
        half = 1 << (self.bits - 1)
        return FixedPlan(binary, mode, self.fraction_bits, -half, half - 1)

    def codes_of(self, rounded: Tensor, binary: Binary) -> Tensor:
        scaled = MUL(rounded, math.ldexp(1.0, self.fraction_bits))
        codes = scaled.nan_to_num_(nan=0.0).to(torch.int64)
        return codes.bitwise_and_((1 << self.bits) - 1)

    def values_of(self, codes: Tensor) -> Tensor:
        half = 1 << (self.bits - 1)
        signed = SUB(AND(ADD(codes, half), 2 * half - 1), half)
        return MUL(signed.to(torch.float64), self.epsilon)

    def coding(self, binary: Binary) -> Coding:
        return Coding("fixed", _FixedCodes(self.bits, 1.0 / self.epsilon, self.epsilon))


@dataclass(frozen=True)
class ExponentPlan(Plan):
    """Rounds to powers of two by cutting off the mantissa in the bits of float64."""

    least: int  # the bits of the smallest number
    most: int  # the bits of the largest number
    beyond: int  # the bits that replace numbers beyond that: NaN or the largest

    def round(self, x: Tensor, noise: Tensor | None) -> Tensor:
        binary = self.binary
        bits = x.view(binary.integer)
        rounded = AND(ADD(bits, self._added(noise)), -(1 << binary.mantissa))
        if self.mode in ("down", "toward_zero"):  # only infinity is beyond the largest
            is_over = GT(bits, binary.infinity - 1)
        else:
            is_over = GT(rounded, self.most)
        rounded = CLAMP(rounded, self.least, self.most).masked_fill_(is_over, self.beyond)
        is_no_power = OR(LE(bits, 0), GT(bits, binary.infinity))
        return rounded.masked_fill_(is_no_power, binary.nan).view(binary.dtype)

    def _added(self, noise: Tensor | None) -> Tensor | int:
        """Returns the number to add to the mantissa before it is cut off."""
        place = self.binary.mantissa
        if self.mode == "stochastic":
            assert noise is not None
            return AND(wide(noise), (1 << place) - 1)
        if self.mode == "up":
            return (1 << place) - 1
        # Of two adjacent powers of two the larger one is even: in units of the smaller it is 2.
        return 1 << (place - 1) if self.mode in ("nearest", "nearest_away") else 0


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

    def plan_in(self, binary: Binary, mode: str, overflow: Overflow) -> ExponentPlan:
        least, most = binary.bits_of(self.smallest_normal), binary.bits_of(self.max)
        return ExponentPlan(binary, mode, least, most, binary.nan if overflow == "nan" else most)

    def codes_of(self, rounded: Tensor, binary: Binary) -> Tensor:
        bits = rounded.to(torch.float64).view(torch.int64)
        codes = SUB(RIGHT(bits, FP64.mantissa), FP64.bias - self.exponent_bias)
        return WHERE(LT(bits, FP64.infinity), codes, (1 << self.bits) - 1)

    def values_of(self, codes: Tensor) -> Tensor:
        codes = AND(codes, (1 << self.bits) - 1)
        fields = LEFT(ADD(codes, FP64.bias - self.exponent_bias), FP64.mantissa)
        values = fields.view(torch.float64)
        return values.masked_fill_(EQ(codes, (1 << self.bits) - 1), math.nan)
