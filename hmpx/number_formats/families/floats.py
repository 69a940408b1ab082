"""Floats: binary floating point with a sign bit, in the variants that hardware has."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor

from ... import arguments
from ...arguments import is_a
from ...errors import OptionError, shown
from ..bits import FP64, Binary
from ..codings import Coding
from ..modes import Overflow
from ..plans import Plan
from ..unpatched import ADD, AND, EQ, GT, LEFT, LT, MUL, NE, OR, RIGHT, SUB, WHERE
from .float_codings import coding
from .float_plans import BitsPlan, FloatPlan
from .number_format import CodedFormat, check_int, check_name, hint, listed

Kind: TypeAlias = Literal["ieee", "p3109", "fn", "fnuz", "finite"]

#: Kind -> what becomes of values beyond the largest, unless the format says otherwise.
_STANDARD_OVERFLOW: Final[dict[str, Overflow]] = {
    "ieee": "inf",
    "p3109": "inf",
    "fn": "nan",
    "fnuz": "nan",
    "finite": "saturate",
}

#: Kinds without -0: its code is the only NaN.
_UNSIGNED_ZERO: Final = frozenset({"p3109", "fnuz"})

#: Kinds that may have no mantissa bits: the codes with the largest exponent are numbers.
_POWERS: Final = frozenset({"fnuz", "finite"})

#: Kind -> what may become of them.
_ALLOWED_OVERFLOW: Final[dict[str, tuple[Overflow, ...]]] = {
    "ieee": ("inf", "nan", "saturate"),
    "p3109": ("inf", "nan", "saturate"),
    "fn": ("nan", "saturate"),
    "fnuz": ("nan", "saturate"),
    "finite": ("saturate",),
}


@dataclass(frozen=True)
class Float(CodedFormat):
    """A binary floating-point format with a sign bit.

    Attributes:
        name: An identifier.
        exponent_bits: Width of the exponent field.
        mantissa_bits: Width of the fraction field; the leading 1 is not stored. 0 only in the kinds
            ``"fnuz"`` and ``"finite"``.
        bias: What is added to exponents in the exponent field; None: ``2**(exponent_bits - 1) - 1``, for
            ``"fnuz"`` and ``"p3109"`` one more.
        kind: ``"ieee"``: the largest exponent field holds infinities and NaNs. ``"p3109"``: as in the
            draft of IEEE P3109, the largest code is infinity, and there is no -0, whose code is the
            only NaN. ``"fn"``: no infinities, NaN is the code with all bits set. ``"fnuz"``: no
            infinities, no -0, whose code is the only NaN. ``"finite"``: neither infinities nor NaN.
        subnormals: Whether an exponent field of 0 holds numbers below the smallest normal one, or
            zero only.
        overflow: What becomes of values beyond the largest: ``"inf"``, ``"nan"`` or ``"saturate"``;
            None: the kind's own.

    Example:
        >>> e3m2 = hmpx.formats.Float("e3m2", exponent_bits=3, mantissa_bits=2, kind="finite")
        >>> hmpx.formats.quantize(torch.tensor([1.1, 1.2, 100.0]), e3m2)
        tensor([ 1.0000,  1.2500, 28.0000])
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int | None = None
    kind: Kind = "ieee"
    subnormals: bool = True
    overflow: Overflow | None = None

    plans = (FloatPlan, BitsPlan)

    def __post_init__(self) -> None:
        """Checks the fields.

        Raises:
            OptionError: A field has a value that it can't have, or the format has values beyond
                those of float64.
        """
        check_name(self.name)
        _make_plain(self, "kind")
        _make_plain(self, "overflow")
        if not is_a(self.kind, str) or self.kind not in _STANDARD_OVERFLOW:
            raise OptionError(
                f"format {self.name}: kind must be one of {listed(_STANDARD_OVERFLOW)}, "
                f"not {shown(self.kind)}{hint(self.kind, _STANDARD_OVERFLOW)}"
            )
        arguments.truth(f"format {self.name}: subnormals", self.subnormals)
        least = 2 if self.kind == "ieee" else 1
        check_int(self.name, "exponent_bits", self.exponent_bits, least, 11)
        least = 0 if self.kind in _POWERS else 1
        check_int(self.name, "mantissa_bits", self.mantissa_bits, least, 52)
        if self.bias is not None:
            check_int(self.name, "bias", self.bias, -1023, 2046)
        self.check_overflow(self.overflow)
        lowest, highest = self.min_exponent, self.max_exponent
        is_inside = (
            lowest - self.mantissa_bits - 1 >= -1022 and highest + 53 - self.mantissa_bits <= 1023
        )
        is_double = lowest == -1022 and highest <= 1023 and self.mantissa_bits > 0
        if not (is_inside or is_double):
            raise OptionError(
                f"format {self.name}: exponents from {lowest} to {highest} with {self.mantissa_bits} "
                "mantissa bits are beyond float64, in which formats are computed; "
                "take fewer exponent bits or another bias"
            )

    @property
    def exponent_bias(self) -> int:
        """What is added to exponents in the exponent field."""
        if self.bias is not None:
            return self.bias
        return (1 << (self.exponent_bits - 1)) - self.has_negative_zero

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal number."""
        return 1 - self.exponent_bias

    @property
    def max_exponent(self) -> int:
        """The exponent of the largest number."""
        return (1 << self.exponent_bits) - 1 - (self.kind == "ieee") - self.exponent_bias

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def significand_bits(self) -> int:
        """Bits of a normal number's significand, the leading 1 included."""
        return self.mantissa_bits + 1

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next larger number."""
        return math.ldexp(1.0, -self.mantissa_bits)

    @property
    def max(self) -> float:
        """The largest finite number."""
        # The code with all bits set may be NaN or infinity: then the largest is one below.
        steps = (2 << self.mantissa_bits) - (2 if self.kind in ("fn", "p3109") else 1)
        return math.ldexp(steps, self.max_exponent - self.mantissa_bits)

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number with a full significand."""
        return math.ldexp(1.0, self.min_exponent)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive number."""
        if not self.subnormals:
            return self.smallest_normal
        return math.ldexp(1.0, self.min_exponent - self.mantissa_bits)

    @property
    def has_inf(self) -> bool:
        """Whether there are infinities."""
        return self.kind in ("ieee", "p3109")

    @property
    def has_nan(self) -> bool:
        """Whether there is a NaN."""
        return self.kind != "finite"

    @property
    def has_negative_zero(self) -> bool:
        """Whether 0 and -0 differ."""
        return self.kind not in _UNSIGNED_ZERO

    # --- rounding ------------------------------------------------------------------------------

    @property
    def allowed_overflow(self) -> tuple[Overflow, ...]:
        """What values beyond the largest may become."""
        return _ALLOWED_OVERFLOW[self.kind]

    @property
    def default_overflow(self) -> Overflow:
        """What they become unless something else is asked for."""
        return self.overflow or _STANDARD_OVERFLOW[self.kind]

    @property
    def fits_in_float32(self) -> bool:
        """Whether float32 has room for all values, and for what rounding adds to them."""
        lowest, highest, mantissa = self.min_exponent, self.max_exponent, self.mantissa_bits
        if lowest == -126:
            return highest <= 127 and 0 < mantissa <= 23
        return mantissa <= 22 and lowest - mantissa - 1 >= -126 and highest + 24 - mantissa <= 127

    @property
    def is_exact_in_float32(self) -> bool:
        """Whether every value is one of float32."""
        return (
            self.mantissa_bits <= 23
            and self.max_exponent <= 127
            and self.smallest_subnormal >= 2.0**-149
        )

    def includes(self, dtype: torch.dtype, overflow: Overflow) -> bool:
        """Whether all values of ``dtype``, infinities and NaNs too, are values of this format."""
        if overflow != "inf" or not self.subnormals or not self.has_negative_zero:
            return False
        info = torch.finfo(dtype)
        return (
            self.max >= info.max
            and self.epsilon <= info.eps
            and self.min_exponent <= math.frexp(info.smallest_normal)[1] - 1
        )

    def plan_in(self, binary: Binary, mode: str, overflow: Overflow) -> Plan:
        """Returns how to round tensors of a binary type that the format fits in."""
        beyond = {"inf": math.inf, "nan": math.nan, "saturate": self.max}[overflow]
        if self.min_exponent == 1 - binary.bias:
            return BitsPlan(
                binary,
                mode,
                self.mantissa_bits,
                binary.bits_of(self.max),
                binary.bits_of(beyond),
                self.subnormals,
                self.has_negative_zero,
            )
        return FloatPlan(
            binary,
            mode,
            self.mantissa_bits,
            self.min_exponent,
            self.max_exponent,
            self.max,
            beyond,
            self.subnormals,
            self.has_negative_zero,
        )

    # --- codes ---------------------------------------------------------------------------------

    def codes_of(self, rounded: Tensor, binary: Binary) -> Tensor:
        """Returns the codes of values of the format, as integers of the binary's width."""
        mantissa, dropped = self.mantissa_bits, binary.mantissa - self.mantissa_bits
        bits = rounded.view(binary.integer)
        whole = AND(bits, binary.magnitude)
        codes = RIGHT(whole, dropped).sub_((binary.bias - self.exponent_bias) << mantissa)
        if self.min_exponent > 1 - binary.bias:
            # Adding a power of two leaves multiples of the smallest number in the lowest bits.
            power = math.ldexp(1.0, self.min_exponent + dropped)
            low = ADD(whole.view(binary.dtype), power).view(binary.integer)
            low = low.sub_(binary.bits_of(power))
            is_low = LT(whole, (self.min_exponent + binary.bias) << binary.mantissa)
            codes = WHERE(is_low, low, codes)
        sign = AND(RIGHT(bits, binary.width - 1), 1)
        top = ((1 << self.exponent_bits) - 1) << mantissa
        is_nan = GT(whole, binary.infinity)
        if self.kind == "ieee":
            codes = codes.masked_fill_(EQ(whole, binary.infinity), top)
            codes = codes.masked_fill_(is_nan, top | (1 << (mantissa - 1)))
        elif self.kind == "fn":
            codes = codes.masked_fill_(is_nan, top | ((1 << mantissa) - 1))
        elif self.kind in _UNSIGNED_ZERO:
            codes = codes.masked_fill_(EQ(whole, binary.infinity), top | ((1 << mantissa) - 1))
            codes = codes.masked_fill_(is_nan, 0)
            sign = sign.masked_fill_(is_nan, 1)
        else:
            codes = codes.masked_fill_(is_nan, 0)
            sign = WHERE(is_nan, SUB(1, sign), sign)
        return OR(codes, LEFT(sign, self.bits - 1))

    def coding(self, binary: Binary, keeps_sign_of_nan: bool = True) -> Coding:
        """Returns what kernels are told to make or read the codes of values of a binary type.

        Args:
            binary: The type.
            keeps_sign_of_nan: Whether that of a NaN is its code's, where the format has both.
        """
        return coding(self, binary, keeps_sign_of_nan)

    def values_of(self, codes: Tensor) -> Tensor:
        """Returns the values of int64 codes, in float64."""
        mantissa = self.mantissa_bits
        field = AND(RIGHT(codes, mantissa), (1 << self.exponent_bits) - 1)
        fraction = AND(codes, (1 << mantissa) - 1)
        sign = AND(RIGHT(codes, self.bits - 1), 1)
        bits = LEFT(ADD(field, FP64.bias - self.exponent_bias), FP64.mantissa)
        normal = OR(bits, LEFT(fraction, FP64.mantissa - mantissa)).view(torch.float64)
        step = math.ldexp(1.0, self.min_exponent - mantissa) if self.subnormals else 0.0
        values = WHERE(EQ(field, 0), MUL(fraction.to(torch.float64), step), normal)
        if self.kind == "ieee":
            is_top = EQ(field, (1 << self.exponent_bits) - 1)
            values = values.masked_fill_(is_top, math.inf)
            values = values.masked_fill_(AND(is_top, NE(fraction, 0)), math.nan)
        elif self.kind in ("fn", "p3109"):
            is_last = EQ(AND(codes, (1 << (self.bits - 1)) - 1), (1 << (self.bits - 1)) - 1)
            values = values.masked_fill_(is_last, math.nan if self.kind == "fn" else math.inf)
        if self.kind in _UNSIGNED_ZERO:
            values = values.masked_fill_(
                EQ(AND(codes, (1 << self.bits) - 1), 1 << (self.bits - 1)), math.nan
            )
        return OR(values.view(torch.int64), LEFT(sign, 63)).view(torch.float64)


def _make_plain(format: Float, field: str) -> None:
    """Makes a string of a class of the user's own, which may compare as it likes, a plain one."""
    value = getattr(format, field)
    if is_a(value, str):
        object.__setattr__(format, field, str.__str__(value))
