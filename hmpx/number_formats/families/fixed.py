"""Fixed point."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from ...errors import OptionError
from ..bits import Binary
from ..layouts import NO_GRID, Grid
from ..noise import uniform
from ..plans import Coding, Plan, struct
from ..unpatched import ABS, ADD, AND, CLAMP, EQ, FLOOR, GE, LT, MUL, SUB, TRUNC, WHERE
from ..vocabulary import Overflow
from .number_format import CodedFormat, Figures, check_int, check_name

#: The kernel's ``fixed_spec``.
FixedSpec: Final = struct(("mode", ctypes.c_int64), ("scale step least most", ctypes.c_double))

#: The kernels' ``fixed_codes``.
_FixedCodes: Final = struct(("bits", ctypes.c_int64), ("scale step", ctypes.c_double))


@dataclass(frozen=True)
class FixedPlan(Plan):
    """Rounds to fixed point with a number of fraction bits, within bounds in units of the last place."""

    binary: Binary
    mode: str
    fraction: int
    least: int
    most: int

    kernel = "fixed"

    def round(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """Returns ``x`` rounded."""
        scaled = MUL(x, math.ldexp(1.0, self.fraction))
        if self.mode == "nearest":
            whole = scaled.round_()
        elif self.mode == "toward_zero":
            whole = scaled.trunc_()
        elif self.mode == "up":
            whole = scaled.ceil_()
        elif self.mode == "down":
            whole = scaled.floor_()
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
        """Returns the kernel's ``fixed_spec``."""
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

    name: str
    integer_bits: int
    fraction_bits: int

    def __post_init__(self) -> None:
        """Checks the fields; raises `OptionError`."""
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
        """Whether float32 has room for all values and for rounding them."""
        return self.bits <= 25

    @property
    def is_exact_in_float32(self) -> bool:
        """Whether float32 holds every value exactly."""
        return self.bits <= 25

    def plan_in(self, binary: Binary, mode: str, overflow: Overflow) -> FixedPlan:
        """Returns the plan for tensors of a binary type that has room for the format."""
        half = 1 << (self.bits - 1)
        return FixedPlan(binary, mode, self.fraction_bits, -half, half - 1)

    def codes_of(self, rounded: Tensor, binary: Binary) -> Tensor:
        """Returns the codes of the format's values, as integers of any width."""
        scaled = MUL(rounded, math.ldexp(1.0, self.fraction_bits))
        codes = scaled.nan_to_num_(nan=0.0).to(torch.int64)
        return codes.bitwise_and_((1 << self.bits) - 1)

    def values_of(self, codes: Tensor) -> Tensor:
        """Returns the values of int64 codes, in float64."""
        half = 1 << (self.bits - 1)
        signed = SUB(AND(ADD(codes, half), 2 * half - 1), half)
        return MUL(signed.to(torch.float64), self.epsilon)

    def coding(self, binary: Binary) -> Coding:
        """Returns the coding of values of a binary type, for kernels."""
        return Coding("fixed", _FixedCodes(self.bits, 1.0 / self.epsilon, self.epsilon))
