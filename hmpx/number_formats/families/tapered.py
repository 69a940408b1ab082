"""Formats whose precision tapers off: how posits and takums are rounded.

The further an exponent is from 0, the fewer bits of the mantissa are left: families say how many.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..bits import Binary, may_grow, ones_if_positive
from ..noise import uniform
from ..plans import Plan
from ..unpatched import ADD, AND, CLAMP, DIV, GE, LEFT, LT, RIGHT, SUB, WHERE


@dataclass(frozen=True)
class TaperedPlan(Plan):
    """Exponent and mantissa of a number are cut where a code leaves no bits for them.

    Attributes:
        binary: The type that it computes in.
        mode: The rounding mode.
        bits: Bits of a code.
        keeps_inf: Whether infinities become NaR, thus NaN, or the largest number.
    """

    binary: Binary
    mode: str
    bits: int
    keeps_inf: bool

    @property
    def least(self) -> int:
        """The bits of the smallest positive number."""
        raise NotImplementedError

    @property
    def most(self) -> int:
        """The bits of the largest number."""
        raise NotImplementedError

    @property
    def parity(self) -> int:
        """What makes the place above the mantissa as odd as a code that ends there."""
        raise NotImplementedError

    @property
    def last(self) -> int:
        """The largest bits of a number that doesn't become NaN."""
        return self.binary.infinity - self.keeps_inf

    def cut(self, scaled: Tensor) -> Tensor:
        """Returns how many bits of numbers a code has no room for; of their bits less those of 1."""
        raise NotImplementedError

    def round(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """Returns the values of ``x`` rounded."""
        binary = self.binary
        bits = x.view(binary.integer)
        whole = AND(bits, binary.magnitude)
        start = binary.bias << binary.mantissa
        scaled = CLAMP(whole, self.least, self.most).sub_(start)
        shift = self.cut(scaled)
        unit = LEFT(1, shift)
        if self.mode == "nearest":
            is_odd = RIGHT(ADD(scaled, self.parity), shift).bitwise_and_(1)
            added = RIGHT(unit, 1).sub_(1).add_(is_odd).add_(scaled)
        elif self.mode == "nearest_away":
            added = RIGHT(unit, 1).add_(scaled)
        elif self.mode in ("up", "down"):
            grows = may_grow(bits, self.mode)
            added = WHERE(grows, ADD(scaled, unit).sub_(1), scaled)
        else:
            added = scaled
        rounded = CLAMP(AND(added, -unit).add_(start), max=self.most)
        if self.mode not in ("nearest", "nearest_away"):
            # Only these two never round to zero.
            is_tiny = LT(whole, self.least)
            if self.mode == "stochastic":
                rounded = self._drawn(whole, rounded, unit, is_tiny, noise)
            else:
                if self.mode in ("up", "down"):
                    is_tiny = AND(is_tiny, ~grows)
                rounded = rounded.masked_fill_(is_tiny, 0)
        rounded = AND(rounded, ones_if_positive(whole, binary))
        is_nan = ones_if_positive(SUB(whole, self.last), binary)
        rounded = rounded.bitwise_or_(is_nan.bitwise_and_(binary.nan))
        sign = AND(bits, binary.sign).bitwise_and_(ones_if_positive(rounded, binary))
        return rounded.bitwise_or_(sign).view(binary.dtype)

    def _drawn(
        self, whole: Tensor, rounded: Tensor, unit: Tensor, is_tiny: Tensor, noise: Tensor | None
    ) -> Tensor:
        """Returns the bits of one of the neighbours, by chance in proportion to how near they are."""
        assert noise is not None
        binary = self.binary
        below = rounded.masked_fill(is_tiny, 0)
        above = WHERE(is_tiny, self.least, ADD(rounded, unit))
        low, high = below.view(binary.dtype), above.view(binary.dtype)
        magnitude = CLAMP(whole, max=self.most).view(binary.dtype)
        share = DIV(SUB(magnitude, low), SUB(high, low))
        return WHERE(GE(share, uniform(noise, binary)), above, below)
