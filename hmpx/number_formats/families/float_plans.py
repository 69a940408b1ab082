"""Rounding to floats: by addition, or on the bits."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..bits import Binary, may_grow, ones_if_positive
from ..layouts import NO_GRID, Grid
from ..noise import uniform, wide
from ..plans import Plan
from ..unpatched import ADD, AND, CLAMP, DIV, EQ, GE, GT, LT, MUL, OR, RIGHT, SUB, WHERE, XOR


@dataclass(frozen=True)
class FloatPlan(Plan):
    """Rounds to floats by an addition: of the power of two that leaves as many bits as wanted."""

    binary: Binary
    mode: str
    mantissa: int
    min_exponent: int
    max_exponent: int
    max: float
    beyond: float  # replaces numbers beyond the largest: infinity, NaN or the largest
    has_subnormals: bool
    has_negative_zero: bool

    kernel = "float"

    @property
    def lowest(self) -> int:
        """The exponent field of the smallest normal number, in place."""
        return (self.min_exponent + self.binary.bias) << self.binary.mantissa

    @property
    def highest(self) -> int:
        """The exponent field beyond the largest number, in place."""
        return (self.max_exponent + 1 + self.binary.bias) << self.binary.mantissa

    @property
    def lift(self) -> int:
        """The distance from an exponent field to that of the power of two to add, in place."""
        return (self.binary.mantissa - self.mantissa) << self.binary.mantissa

    @property
    def lowest_power(self) -> int:
        """The bits of the power of two to add to numbers below the smallest normal one."""
        return self.lowest + (
            self.lift if self.has_subnormals else self.binary.mantissa << self.binary.mantissa
        )

    def round(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """Returns the values of ``x`` rounded."""
        binary = self.binary
        bits = x.view(binary.integer)
        power = AND(bits, binary.infinity)
        if self.has_subnormals:
            power = CLAMP(power, self.lowest, self.highest).add_(self.lift)
        else:
            lifted = CLAMP(power, max=self.highest).add_(self.lift)
            power = WHERE(LT(power, self.lowest), self.lowest_power, lifted)
        power = power.view(binary.dtype)
        whole = AND(bits, binary.magnitude)
        magnitude = whole.view(binary.dtype)
        if self.mode == "nearest":
            rounded = magnitude.add_(power).sub_(power)
        else:
            rounded = self._directed(bits, whole, power, noise)
        rounded = self._bounded(bits, rounded)
        found = rounded.view(binary.integer)
        sign = AND(bits, binary.sign)
        if not self.has_negative_zero:
            sign = sign.bitwise_and_(ones_if_positive(found, binary))
        return OR(found, sign).view(binary.dtype)

    def _directed(self, bits: Tensor, whole: Tensor, power: Tensor, noise: Tensor | None) -> Tensor:
        """Returns magnitudes rounded in another mode, by steps from the nearest even."""
        binary = self.binary
        magnitude = whole.view(binary.dtype)
        nearest = SUB(ADD(magnitude, power), power)
        found = nearest.view(binary.integer)  # compared as integers: no denormals are flushed
        step = MUL(power, math.ldexp(1.0, -binary.mantissa))
        if self.mode == "nearest_away":
            is_tie = EQ(SUB(magnitude, nearest), MUL(step, 0.5))
            return WHERE(is_tie, ADD(nearest, step), nearest)
        if self.mode == "stochastic":
            assert noise is not None
            below = WHERE(GT(found, whole), SUB(nearest, step), nearest)
            share = DIV(SUB(magnitude, below), step)
            return WHERE(GE(share, uniform(noise, binary)), ADD(below, step), below)
        is_below, is_above = LT(found, whole), GT(found, whole)
        if self.mode == "toward_zero":
            return WHERE(is_above, SUB(nearest, step), nearest)
        grows = may_grow(bits, self.mode)
        rounded = WHERE(AND(is_below, grows), ADD(nearest, step), nearest)
        return WHERE(AND(is_above, ~grows), SUB(nearest, step), rounded)

    def _bounded(self, bits: Tensor, rounded: Tensor) -> Tensor:
        """Returns magnitudes with those beyond the largest replaced; may change ``rounded``."""
        if self.beyond == self.max:
            return CLAMP(rounded, max=self.max)
        if self.mode in ("nearest", "nearest_away", "stochastic"):
            # Infinity where it is beyond, or else 0: by arithmetic, since comparing and choosing take
            # far longer where no compiler fuses them.
            huge = math.ldexp(1.0, self.binary.bias)
            excess = CLAMP(SUB(rounded, self.max), min=0.0).mul_(huge).mul_(huge)
            if self.beyond == math.inf:
                return rounded.add_(excess)
            rounded = rounded.add_(SUB(excess, excess))  # NaN, which some processors make negative
            bits = rounded.view(self.binary.integer)
            return bits.bitwise_and_(self.binary.magnitude).view(self.binary.dtype)
        # What is rounded towards zero ends at the largest number; only infinity is beyond.
        is_inf = EQ(AND(bits, self.binary.magnitude), self.binary.infinity)
        goes_beyond = is_inf
        if self.mode != "toward_zero":
            grows = may_grow(bits, self.mode)
            goes_beyond = OR(is_inf, grows)
        is_over = GT(rounded, self.max)
        rounded = CLAMP(rounded, max=self.max)
        return rounded.masked_fill_(AND(is_over, goes_beyond), self.beyond)

    def kernel_numbers(self) -> tuple[int, ...]:
        """Returns the numbers of the kernel's ``float_spec``."""
        return (
            self.mode_number,
            self.lowest,
            self.highest,
            self.lift,
            self.lowest_power,
            self.binary.bits_of(self.max),
            self.binary.bits_of(self.beyond),
            self.has_negative_zero,
        )

    def kernel_spec(self, grid: Grid = NO_GRID) -> Any:
        """Returns the kernel's ``float_spec``."""
        return (ctypes.c_int64 * 8)(*self.kernel_numbers())


@dataclass(frozen=True)
class BitsPlan(Plan):
    """Rounds to floats with the exponents of the type that is computed in: bits are added and cut off."""

    binary: Binary
    mode: str
    mantissa: int
    max: int  # the bits of the largest number
    beyond: int  # the bits of what numbers beyond that become: infinity, NaN or the largest
    has_subnormals: bool
    has_negative_zero: bool

    kernel = "bits"

    @property
    def unit(self) -> int:
        """The bit of the last place kept."""
        return 1 << (self.binary.mantissa - self.mantissa)

    @property
    def lowest_unit(self) -> int:
        """The same below the smallest normal number."""
        return self.unit if self.has_subnormals else 1 << self.binary.mantissa

    def round(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """Returns the values of ``x`` rounded."""
        binary = self.binary
        bits = x.view(binary.integer)
        if (
            self.mode == "nearest"
            and self.has_subnormals
            and self.has_negative_zero
            and self.unit > 1
            and self.max + self.unit == self.beyond == binary.infinity
        ):
            # Half a unit in the last place less one, and one more if that place is odd.
            rounded = RIGHT(bits, binary.mantissa - self.mantissa).bitwise_and_(1)
            rounded = rounded.add_((self.unit >> 1) - 1).add_(bits).bitwise_and_(-self.unit)
            is_nan = ones_if_positive(AND(bits, binary.magnitude).sub_(binary.infinity), binary)
            return XOR(XOR(rounded, bits).bitwise_and_(is_nan), rounded).view(binary.dtype)
        whole = AND(bits, binary.magnitude)
        rounded = self._cut(bits, whole, self.unit, noise)
        if not self.has_subnormals:
            is_low = LT(whole, 1 << binary.mantissa)
            rounded = WHERE(is_low, self._cut(bits, whole, self.lowest_unit, noise), rounded)
        rounded = self._bounded(bits, whole, rounded)
        rounded = WHERE(GT(whole, binary.infinity), whole, rounded)  # NaN
        sign = AND(bits, binary.sign)
        if not self.has_negative_zero:
            sign = WHERE(EQ(rounded, 0), 0, sign)
        return OR(rounded, sign).view(binary.dtype)

    def _cut(self, bits: Tensor, whole: Tensor, unit: int, noise: Tensor | None) -> Tensor:
        """Returns the bits of magnitudes, rounded to multiples of ``unit``."""
        if unit == 1:
            return whole
        half = unit >> 1
        if self.mode == "nearest":
            is_odd = RIGHT(whole, unit.bit_length() - 1).bitwise_and_(1)
            added = is_odd.add_(half - 1).add_(whole)
        elif self.mode == "nearest_away":
            added = ADD(whole, half)
        elif self.mode == "stochastic":
            assert noise is not None
            noise = wide(noise) if self.binary.mantissa == 52 else noise
            added = ADD(whole, AND(noise, unit - 1))
        elif self.mode == "toward_zero":
            added = whole
        else:
            grows = may_grow(bits, self.mode)
            added = WHERE(grows, ADD(whole, unit - 1), whole)
        return AND(added, -unit)

    def _bounded(self, bits: Tensor, whole: Tensor, rounded: Tensor) -> Tensor:
        if self.beyond == self.max:
            return CLAMP(rounded, max=self.max)
        is_over = GT(rounded, self.max)
        if self.mode in ("nearest", "nearest_away", "stochastic"):
            return rounded.masked_fill(is_over, self.beyond)
        goes_beyond = EQ(whole, self.binary.infinity)
        if self.mode != "toward_zero":
            grows = may_grow(bits, self.mode)
            goes_beyond = OR(goes_beyond, grows)
        rounded = CLAMP(rounded, max=self.max)
        return rounded.masked_fill_(AND(is_over, goes_beyond), self.beyond)

    def kernel_spec(self, grid: Grid = NO_GRID) -> Any:
        """Returns the kernel's ``bits_spec``."""
        return (ctypes.c_int64 * 7)(
            self.mode_number,
            self.unit,
            self.lowest_unit,
            self.max,
            self.beyond,
            self.has_negative_zero,
            self.unit.bit_length() - 1,
        )
