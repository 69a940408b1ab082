"""Posits by their definition, in Python integers and fractions; nothing is shared with hmpx.

The value of a code follows the posit standard's formula; rounding follows its rule, that the point
between neighbours U and W is the posit of one bit more whose code is U followed by a 1.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from fractions import Fraction


def value(code: int, bits: int, es: int) -> Fraction | None:
    """Returns the value of a code; None for NaR."""
    if code == 0:
        return Fraction(0)
    if code == 1 << (bits - 1):
        return None
    if code >> (bits - 1):
        negated = value((1 << bits) - code, bits, es)
        assert negated is not None
        return -negated
    text = format(code, f"0{bits}b")[1:]
    run = len(text) - len(text.lstrip(text[0]))
    regime = run - 1 if text[0] == "1" else -run
    rest = text[run + 1 :]
    exponent = int(rest[:es].ljust(es, "0") or "0", 2)
    fraction = rest[es:]
    significand = 1 + Fraction(int(fraction or "0", 2), 2 ** len(fraction))
    return significand * Fraction(2) ** (regime * 2**es + exponent)


class Reference:
    """Rounds to the posits of one size."""

    def __init__(self, bits: int, es: int) -> None:
        self.bits = bits
        codes = range(1, 1 << (bits - 1))
        # Floats are exact: no posit here has more than 53 significant bits.
        self.values = [to_float(value(code, bits, es)) for code in codes]  # of code 1, 2, ...
        self.between = [to_float(value(2 * code + 1, bits + 1, es)) for code in codes]

    def code(self, x: float) -> int:
        """Returns the code to which the standard rounds."""
        if not math.isfinite(x):
            return 1 << (self.bits - 1)
        if x == 0:
            return 0
        magnitude = abs(x)
        below = bisect_right(self.values, magnitude)
        if below == 0:
            found = 1  # never to zero
        elif below == len(self.values):
            found = below  # never to NaR
        else:
            middle = self.between[below - 1]
            goes_up = magnitude > middle or (magnitude == middle and below % 2 == 1)
            found = below + goes_up
        return (1 << self.bits) - found if x < 0 else found

    def round(self, x: float) -> float:
        """Returns the value to which the standard rounds."""
        code = self.code(x)
        if code == 1 << (self.bits - 1):
            return math.nan
        if code == 0:
            return 0.0
        if code >> (self.bits - 1):
            return -self.values[(1 << self.bits) - code - 1]
        return self.values[code - 1]


def to_float(fraction: Fraction | None) -> float:
    """Returns a fraction that a float is equal to."""
    assert fraction is not None
    found = float(fraction)
    assert found == fraction
    return found
