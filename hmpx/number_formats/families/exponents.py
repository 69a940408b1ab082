"""Exponents: powers of two without sign or zero, for the scales of blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...errors import OptionError
from ..bits import FP64, Binary
from ..noise import wide
from ..plans import Plan
from ..unpatched import ADD, AND, CLAMP, EQ, GT, LE, LEFT, LT, OR, RIGHT, SUB, WHERE
from ..vocabulary import Overflow
from .number_format import CodedFormat, Figures, check_int, check_name


@dataclass(frozen=True)
class ExponentPlan(Plan):
    """Rounds to powers of two by cutting off the mantissa in the bits of float64."""

    binary: Binary
    mode: str
    least: int  # the bits of the smallest number
    most: int  # the bits of the largest number
    beyond: int  # the bits that replace numbers beyond that: NaN or the largest

    def round(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """Returns ``x`` rounded."""
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

    name: str
    bits: int
    bias: int | None = None

    def __post_init__(self) -> None:
        """Checks the fields; raises `OptionError`."""
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

    @property
    def is_exact_in_float32(self) -> bool:
        """Whether float32 holds every value exactly."""
        return self.exponent_bias <= 149 and self.max_exponent <= 127

    def plan_in(self, binary: Binary, mode: str, overflow: Overflow) -> ExponentPlan:
        """Returns the plan for tensors of a binary type that has room for the format."""
        least, most = binary.bits_of(self.smallest_normal), binary.bits_of(self.max)
        return ExponentPlan(binary, mode, least, most, binary.nan if overflow == "nan" else most)

    def codes_of(self, rounded: Tensor, binary: Binary) -> Tensor:
        """Returns the codes of the format's values."""
        bits = rounded.to(torch.float64).view(torch.int64)
        codes = SUB(RIGHT(bits, FP64.mantissa), FP64.bias - self.exponent_bias)
        return WHERE(LT(bits, FP64.infinity), codes, (1 << self.bits) - 1)

    def values_of(self, codes: Tensor) -> Tensor:
        """Returns the values of int64 codes, in float64."""
        codes = AND(codes, (1 << self.bits) - 1)
        fields = LEFT(ADD(codes, FP64.bias - self.exponent_bias), FP64.mantissa)
        values = fields.view(torch.float64)
        return values.masked_fill_(EQ(codes, (1 << self.bits) - 1), math.nan)
