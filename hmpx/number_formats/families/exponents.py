"""Powers of two, such as the E8M0 scales of blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ...errors import OptionError
from ..bits import FP64, Binary
from ..unpatched import ADD, AND, CLAMP, EQ, GT, LE, LEFT, LT, OR, RIGHT, SUB, WHERE
from ..vocabulary import Overflow
from .floats import cut
from .number_format import CodedFormat, Figures, check_int, check_name


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
