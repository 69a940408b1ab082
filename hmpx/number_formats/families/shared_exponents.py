"""Powers of two that values share: by which rule they follow from the largest magnitude."""

from __future__ import annotations

import math
from typing import Final, Literal, TypeAlias

Rule: TypeAlias = Literal["floor", "rceil", "ceil", "even"]

#: How the shared exponent follows from the largest magnitude, as torchao's ScaleCalculationMode has it.
RULES: Final[tuple[Rule, ...]] = ("floor", "rceil", "ceil", "even")


def exponent_of(largest: float) -> int:
    """Returns the exponent of a positive number."""
    return math.frexp(largest)[1] - 1


def carry(rule: str, largest: float, significand_bits: int, mantissa: int) -> int:
    """Returns what to add to the bits of the largest magnitude before its exponent is taken.

    Args:
        rule: One of `RULES`.
        largest: The element's largest number.
        significand_bits: Of the element.
        mantissa: Bits of the mantissa field of the type that is computed in.
    """
    ones = (1 << mantissa) - 1
    if rule == "ceil":
        return ones
    if rule == "rceil":  # one more where the mantissa is above that of the largest number
        return ones - int((math.frexp(largest)[0] * 2 - 1) * (1 << mantissa))
    return 1 << (mantissa - significand_bits) if rule == "even" else 0
