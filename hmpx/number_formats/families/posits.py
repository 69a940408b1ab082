"""Posits: floating point whose precision tapers off."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import OptionError
from ..bits import FP64, Binary
from ..codings import Coding, integers
from ..layouts import NO_GRID, Grid
from ..modes import Overflow
from ..plans import Plan
from ..unpatched import ADD, AND, CLAMP, EQ, GT, LEFT, LT, OR, RIGHT, SUB, WHERE, XOR
from .number_format import CodedFormat, check_int, check_name
from .tapered import TaperedPlan


@dataclass(frozen=True)
class PositPlan(TaperedPlan):
    """Posits: exponent and mantissa of a number are cut where the regime leaves no bits for them.

    Attributes:
        es: Bits of the exponent field.
    """

    es: int

    kernel = "posit"

    @property
    def max_exponent(self) -> int:
        """The exponent of the largest number; the negative of that of the smallest."""
        return (self.bits - 2) << self.es

    @property
    def most(self) -> int:
        """The bits of the largest number."""
        return (self.binary.bias + self.max_exponent) << self.binary.mantissa

    @property
    def least(self) -> int:
        """The bits of the smallest positive number."""
        return (self.binary.bias - self.max_exponent) << self.binary.mantissa

    @property
    def parity(self) -> int:
        """What makes the place above the exponent field as odd as the end of the longest regimes.

        Those of numbers above 1 end in 0, of others in 1; the largest regimes are ``bits - 3`` and
        ``2 - bits``.
        """
        return 1 << (self.binary.mantissa + self.es) if self.bits % 2 == 0 else 0

    def cut(self, scaled: Tensor) -> Tensor:
        """Returns how many bits of numbers a code has no room for; of their bits less those of 1."""
        regime = RIGHT(scaled, self.binary.mantissa + self.es)
        # Regimes k and -k - 1 take equally many bits.
        length = CLAMP(XOR(regime, RIGHT(regime, 31)), max=self.bits - 3)
        return length.add_(self.binary.mantissa + self.es + 3 - self.bits)

    def kernel_spec(self, grid: Grid = NO_GRID) -> Any:
        """Returns the kernel's ``posit_spec``."""
        return (ctypes.c_int64 * 7)(
            self.mode_number, self.bits, self.es, self.least, self.most, self.parity, self.last
        )


@dataclass(frozen=True)
class Posit(CodedFormat):
    """A posit as the standard of 2022 has it, which fixes ``es`` at 2; others were in use before.

    Attributes:
        name: An identifier.
        bits: Bits of a code.
        es: Bits of the exponent field.

    Example:
        >>> posit6 = hmpx.formats.Posit("posit6", bits=6, es=2)
        >>> hmpx.formats.quantize(torch.tensor([1.1, 100.0, 1e9]), posit6)
        tensor([1.0000e+00, 1.2800e+02, 6.5536e+04])
    """

    name: str
    bits: int
    es: int

    plans = (PositPlan,)

    def __post_init__(self) -> None:
        """Checks the fields.

        Raises:
            OptionError: A field has a value that it can't have, or the format has values beyond
                those of float64.
        """
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
    def significand_bits(self) -> int:
        """Bits of the significand between 1 and 2, where most are left, the leading 1 included."""
        return max(self.bits - 3 - self.es, 0) + 1

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next larger number."""
        kept = self.bits - 3 - self.es
        return math.ldexp(1.0, -kept) if kept >= 0 else math.ldexp(1.0, 1 << -kept) - 1.0

    @property
    def max(self) -> float:
        """The largest number."""
        return math.ldexp(1.0, self.max_exponent)

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number: posits have no subnormals."""
        return math.ldexp(1.0, -self.max_exponent)

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
        return self.bits - 3 - self.es <= 22 and self.max_exponent <= 125

    @property
    def is_exact_in_float32(self) -> bool:
        """Whether every value is one of float32."""
        return self.significand_bits <= 24 and self.max_exponent <= 126

    def plan_in(self, binary: Binary, mode: str, overflow: Overflow) -> Plan:
        """Returns how to round tensors of a binary type that the format fits in."""
        return PositPlan(binary, mode, self.bits, overflow != "saturate", self.es)

    # --- codes ---------------------------------------------------------------------------------

    def codes_of(self, rounded: Tensor, binary: Binary) -> Tensor:
        """Returns the codes of values of the format, as integers of any width."""
        places = binary.mantissa + self.es
        bits = rounded.view(binary.integer)
        whole = AND(bits, binary.magnitude)
        scaled = SUB(whole, binary.bias << binary.mantissa)
        scaled = scaled.clamp_(
            *(e << binary.mantissa for e in (-self.max_exponent, self.max_exponent))
        )
        regime = RIGHT(scaled, places)
        kept = SUB(self.bits - 3, XOR(regime, RIGHT(regime, 31))).clamp_(min=0)
        # 1...10 above 1, 0...01 below
        run = WHERE(LT(regime, 0), 1, SUB(LEFT(1, CLAMP(ADD(regime, 2), min=0)), 2))
        rest = RIGHT(AND(scaled, (1 << places) - 1), SUB(places, kept))
        codes = OR(LEFT(run, kept), rest)
        codes = codes.masked_fill_(EQ(regime, self.bits - 2), (1 << (self.bits - 1)) - 1)
        codes = WHERE(LT(bits, 0), -codes, codes).to(torch.int64)
        codes = codes.bitwise_and_((1 << self.bits) - 1).masked_fill_(EQ(whole, 0), 0)
        return codes.masked_fill_(GT(whole, binary.infinity), 1 << (self.bits - 1))

    def coding(self, binary: Binary) -> Coding:
        """Returns what kernels are told to make or read the codes of values of a binary type."""
        spec = integers(self.bits, self.es, self.max_exponent)
        return Coding("posit", spec, can_decode=self.bits <= binary.mantissa + 2)

    def values_of(self, codes: Tensor) -> Tensor:
        """Returns the values of int64 codes, in float64."""
        bits, es = self.bits, self.es
        codes = AND(codes, (1 << bits) - 1)
        sign = RIGHT(codes, bits - 1)
        whole = AND(WHERE(EQ(sign, 1), -codes, codes), (1 << (bits - 1)) - 1)
        lead = RIGHT(whole, bits - 2)
        # The run of leading bits ends at the highest bit that differs from the first.
        differing = WHERE(EQ(lead, 1), XOR(whole, (1 << (bits - 1)) - 1), whole)
        highest = RIGHT(differing.to(torch.float64).view(torch.int64), FP64.mantissa)
        highest = WHERE(EQ(differing, 0), -1, SUB(highest, FP64.bias))
        run = SUB(bits - 2, highest)
        regime = WHERE(EQ(lead, 1), SUB(run, 1), -run)
        left = CLAMP(highest, min=0)
        rest = AND(whole, SUB(LEFT(1, left), 1))
        # Exponent bits that were cut off are zeros: fill up to 63 - es bits, all of which then count.
        rest = LEFT(rest, SUB(FP64.mantissa + es, left))
        exponent = ADD(LEFT(regime, es), RIGHT(rest, FP64.mantissa))
        fraction = AND(rest, (1 << FP64.mantissa) - 1)
        values = OR(LEFT(ADD(exponent, FP64.bias), FP64.mantissa), fraction).view(torch.float64)
        values = WHERE(EQ(sign, 1), -values, values)
        values = values.masked_fill_(EQ(codes, 0), 0.0)
        return values.masked_fill_(EQ(codes, 1 << (bits - 1)), math.nan)
