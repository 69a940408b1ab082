"""How compiled kernels make and read the codes of floats."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..bits import Binary
from ..codings import Coding, integers

if TYPE_CHECKING:
    from .floats import Float


def coding(format: Float, binary: Binary, keeps_sign_of_nan: bool) -> Coding:
    """Returns what kernels are told to make or read the codes of values of a binary type.

    Args:
        format: The format.
        binary: The type.
        keeps_sign_of_nan: Whether that of a NaN is its code's, where the format has both.
    """
    mantissa, dropped = format.mantissa_bits, binary.mantissa - format.mantissa_bits
    rebias = (binary.bias - format.exponent_bias) << mantissa
    is_lifted = format.min_exponent > 1 - binary.bias
    power = math.ldexp(1.0, format.min_exponent + dropped) if is_lifted else 1.0
    top = ((1 << format.exponent_bits) - 1) << mantissa
    ones = top | ((1 << mantissa) - 1)
    # Of a NaN: its code, whether the sign is kept, and whether that is turned round.
    nan, keeps, flips = {
        "ieee": (top | (1 << mantissa) >> 1, 1, 0),
        "p3109": (0, 0, 1),
        "fn": (ones, 1, 0),
        "fnuz": (0, 0, 1),
        "finite": (0, 1, 1),
    }[format.kind]
    is_scaled = is_lifted or not format.subnormals
    step = format.smallest_subnormal if format.subnormals and is_lifted else 0.0
    infinity = top if format.kind == "ieee" else ones
    spec = integers(
        dropped,
        rebias,
        (format.min_exponent + binary.bias) << binary.mantissa if is_lifted else 0,
        binary.bits_of(power),
        format.bits - 1,
        infinity,
        nan,
        keeps and keeps_sign_of_nan,
        flips,
        ones,
        1 << mantissa if is_scaled else 0,
        binary.bits_of(step),
        infinity if format.has_inf else -1,
        {"ieee": top, "fn": ones - 1}.get(format.kind, ones),
        -1 if format.has_negative_zero else binary.sign,
    )
    # A subnormal step is 0 where the processor takes subnormals for that.
    is_normal = step == 0 or step >= math.ldexp(1.0, 1 - binary.bias)
    return Coding("float", spec, can_decode=is_normal)
