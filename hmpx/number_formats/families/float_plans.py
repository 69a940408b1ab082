"""Rounding to floats, by addition or on the bits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ..bits import may_grow, ones_if_positive, uniform, wide
from ..plans import Plan
from ..unpatched import ADD, AND, CLAMP, DIV, EQ, GE, GT, LT, MUL, OR, RIGHT, SUB, WHERE, XOR


@dataclass(frozen=True)
class FloatPlan(Plan):
    """Rounds to floats by adding the power of two that leaves the wanted number of bits."""

    lowest: int  # the exponent field of the smallest normal number, in place
    highest: int  # the exponent field beyond the largest number, in place
    lift: int  # from an exponent field to that of the power of two to add, in place
    lowest_power: int  # the bits of the power of two to add to numbers below ``lowest``
    max: float
    beyond: float  # replaces numbers beyond the largest: infinity, NaN or the largest
    has_negative_zero: bool

    kernel = "float"
    kernel_fields = "mode_number lowest highest lift lowest_power max beyond has_negative_zero"

    def round(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """Returns ``x`` rounded."""
        binary = self.binary
        bits = x.view(binary.integer)
        power = AND(bits, binary.infinity)
        if self.lowest_power == self.lowest + self.lift:
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
        rounded = _bounded(self, bits, whole, rounded)
        found = rounded.view(binary.integer)
        sign = AND(bits, binary.sign)
        if not self.has_negative_zero:
            sign = sign.bitwise_and_(ones_if_positive(found, binary))
        return OR(found, sign).view(binary.dtype)

    def _directed(self, bits: Tensor, whole: Tensor, power: Tensor, noise: Tensor | None) -> Tensor:
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


@dataclass(frozen=True)
class BitsPlan(Plan):
    """Rounds to floats with the exponent range of the compute type, by adding and cutting bits."""

    unit: int  # the bit of the last place kept
    lowest_unit: int  # the same below the smallest normal number
    max: int  # the bits of the largest number
    beyond: int  # the bits that replace numbers beyond that: infinity, NaN or the largest
    has_negative_zero: bool

    kernel = "bits"
    kernel_fields = "mode_number unit lowest_unit max beyond has_negative_zero place"

    def round(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """Returns ``x`` rounded."""
        binary = self.binary
        bits = x.view(binary.integer)
        unit, is_flushed = self.unit, self.lowest_unit > self.unit
        is_plain = self.mode == "nearest" and self.has_negative_zero and not is_flushed
        if is_plain and unit > 1 and self.max + unit == self.beyond == binary.infinity:
            # Adds half a unit in the last place minus one, plus one if that place is odd: twice as fast.
            rounded = RIGHT(bits, unit.bit_length() - 1).bitwise_and_(1)
            rounded = rounded.add_((unit >> 1) - 1).add_(bits).bitwise_and_(-unit)
            is_nan = ones_if_positive(AND(bits, binary.magnitude).sub_(binary.infinity), binary)
            return XOR(XOR(rounded, bits).bitwise_and_(is_nan), rounded).view(binary.dtype)
        whole = AND(bits, binary.magnitude)
        rounded = self._cut(bits, whole, unit, noise)
        if is_flushed:
            is_low = LT(whole, 1 << binary.mantissa)
            rounded = WHERE(is_low, self._cut(bits, whole, self.lowest_unit, noise), rounded)
        rounded = _bounded(self, bits, whole, rounded)
        rounded = WHERE(GT(whole, binary.infinity), whole, rounded)  # NaN
        sign = AND(bits, binary.sign)
        if not self.has_negative_zero:
            sign = WHERE(EQ(rounded, 0), 0, sign)
        return OR(rounded, sign).view(binary.dtype)

    def _cut(self, bits: Tensor, whole: Tensor, unit: int, noise: Tensor | None) -> Tensor:
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

    @property
    def place(self) -> int:
        """The place of the last bit kept."""
        return self.unit.bit_length() - 1


def _bounded(plan: FloatPlan | BitsPlan, bits: Tensor, whole: Tensor, rounded: Tensor) -> Tensor:
    """Returns rounded magnitudes, as numbers or bits like `max`, with those beyond the largest replaced."""
    if plan.beyond == plan.max:
        return CLAMP(rounded, max=plan.max)
    is_over = GT(rounded, plan.max)
    if plan.mode not in ("nearest", "nearest_away", "stochastic"):
        # Towards zero, numbers stop at the largest; only infinity is beyond.
        goes_beyond = EQ(whole, plan.binary.infinity)
        if plan.mode != "toward_zero":
            goes_beyond = OR(goes_beyond, may_grow(bits, plan.mode))
        is_over = AND(is_over, goes_beyond)
        rounded = CLAMP(rounded, max=plan.max)
    return rounded.masked_fill_(is_over, plan.beyond)
