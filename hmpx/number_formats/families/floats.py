"""Floats: binary floating point with a sign bit, in the variants of hardware."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ... import arguments
from ...errors import OptionError
from ..bits import FP64, Binary, may_grow, ones_if_positive, uniform, wide
from ..plans import Coding, Plan, integers
from ..unpatched import (
    ADD,
    AND,
    CLAMP,
    DIV,
    EQ,
    GE,
    GT,
    LEFT,
    LT,
    MUL,
    NE,
    OR,
    RIGHT,
    SUB,
    WHERE,
)
from ..vocabulary import Overflow
from .number_format import CodedFormat, Figures, check_int, check_name

Kind: TypeAlias = Literal["ieee", "p3109", "fn", "fnuz", "finite"]


class _Traits(NamedTuple):
    overflows: tuple[Overflow, ...]  # the supported overflow behaviours; the default first
    has_negative_zero: bool  # if not, its code is the only NaN
    may_be_powers: bool  # may have no mantissa bits: codes of the largest exponent are numbers
    reserved: int  # how many of the last codes are not numbers, if the exponent is not reserved


_KINDS: Final[dict[str, _Traits]] = {
    "ieee": _Traits(("inf", "nan", "saturate"), True, False, 0),
    "p3109": _Traits(("inf", "nan", "saturate"), False, False, 1),
    "fn": _Traits(("nan", "saturate"), True, False, 1),
    "fnuz": _Traits(("nan", "saturate"), False, True, 0),
    "finite": _Traits(("saturate",), True, True, 0),
}


@dataclass(frozen=True)
class Float(CodedFormat):
    """A binary floating-point format with a sign bit.

    Attributes:
        name: An identifier.
        exponent_bits: Width of the exponent field.
        mantissa_bits: Width of the fraction field; the leading 1 is not stored. 0 only in the kinds
            ``"fnuz"`` and ``"finite"``.
        bias: The offset of the exponent field; None: ``2**(exponent_bits - 1) - 1``, for ``"fnuz"`` and
            ``"p3109"`` one more.
        kind: ``"ieee"``: the largest exponent field holds infinities and NaNs. ``"p3109"``: as in the
            draft of IEEE P3109, the largest code is infinity, and the code of -0 is the only NaN.
            ``"fn"``: no infinities, NaN is the code with all bits set. ``"fnuz"``: no infinities, and the
            code of -0 is the only NaN. ``"finite"``: neither infinities nor NaN.
        subnormals: Whether an exponent field of 0 encodes numbers below the smallest normal one, or only
            zero.
        overflow: How values beyond the largest are handled: ``"inf"``, ``"nan"`` or ``"saturate"``;
            None: the kind's default.

    Example:
        >>> e3m2 = hmpx.formats.Float("e3m2", exponent_bits=3, mantissa_bits=2, kind="finite")
        >>> hmpx.formats.quantize(torch.tensor([1.1, 1.2, 100.0]), e3m2)
        tensor([ 1.0000,  1.2500, 28.0000])
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int | None = None
    kind: Kind = "ieee"
    subnormals: bool = True
    overflow: Overflow | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        what = f"format {self.name}"
        object.__setattr__(self, "kind", arguments.choice(f"{what}: kind", self.kind, _KINDS))
        arguments.truth(f"{what}: subnormals", self.subnormals)
        check_int(self.name, "exponent_bits", self.exponent_bits, 1 + (self.kind == "ieee"), 11)
        least = 0 if _KINDS[self.kind].may_be_powers else 1
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
                f"{what}: exponents from {lowest} to {highest} with {self.mantissa_bits} "
                "mantissa bits are beyond float64, in which formats are computed; "
                "take fewer exponent bits or another bias"
            )

    @property
    def exponent_bias(self) -> int:
        """The offset of the exponent field."""
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
    def _figures(self) -> Figures:
        mantissa = self.mantissa_bits
        steps = (2 << mantissa) - 1 - _KINDS[self.kind].reserved
        return Figures(
            mantissa + 1,
            math.ldexp(1.0, -mantissa),
            math.ldexp(steps, self.max_exponent - mantissa),
            math.ldexp(1.0, self.min_exponent),
            math.ldexp(1.0, self.min_exponent - (mantissa if self.subnormals else 0)),
        )

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
        return _KINDS[self.kind].has_negative_zero

    # --- rounding ------------------------------------------------------------------------------

    @property
    def allowed_overflow(self) -> tuple[Overflow, ...]:
        return _KINDS[self.kind].overflows

    @property
    def default_overflow(self) -> Overflow:
        return self.overflow or _KINDS[self.kind].overflows[0]

    @property
    def fits_in_float32(self) -> bool:
        lowest, highest, mantissa = self.min_exponent, self.max_exponent, self.mantissa_bits
        if lowest == -126:
            return highest <= 127 and 0 < mantissa <= 23
        return mantissa <= 22 and lowest - mantissa - 1 >= -126 and highest + 24 - mantissa <= 127

    def plan(self, dtype: torch.dtype, mode: str, overflow: str | None) -> Plan | None:
        info = torch.finfo(dtype)
        is_kept = (overflow or self.default_overflow) == "inf" and (
            self.subnormals
            and self.has_negative_zero
            and self.max >= info.max
            and self.epsilon <= info.eps
            and self.smallest_normal <= info.smallest_normal
        )
        return None if is_kept else super().plan(dtype, mode, overflow)

    def plan_in(self, binary: Binary, mode: str, overflow: Overflow) -> FloatPlan | BitsPlan:
        most, place = self.max, binary.mantissa
        beyond = {"inf": math.inf, "nan": math.nan, "saturate": most}[overflow]
        if self.min_exponent == 1 - binary.bias:
            unit = 1 << (place - self.mantissa_bits)
            units = unit, unit if self.subnormals else 1 << place
            ends = binary.bits_of(most), binary.bits_of(beyond)
            return BitsPlan(binary, mode, *units, *ends, self.has_negative_zero)
        lowest = (self.min_exponent + binary.bias) << place
        highest = (self.max_exponent + 1 + binary.bias) << place
        lift = (place - self.mantissa_bits) << place
        power = lowest + (lift if self.subnormals else place << place)
        fields = lowest, highest, lift, power
        return FloatPlan(binary, mode, *fields, most, beyond, self.has_negative_zero)

    # --- codes ---------------------------------------------------------------------------------

    def codes_of(self, rounded: Tensor, binary: Binary) -> Tensor:
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
        special = self._special_codes()
        is_nan = GT(whole, binary.infinity)
        codes = codes.masked_fill_(EQ(whole, binary.infinity), special.infinity)
        codes = codes.masked_fill_(is_nan, special.nan)
        if special.flips_sign:
            own = SUB(1, sign) if special.keeps_sign else 1
            sign = WHERE(is_nan, own, sign)
        return OR(codes, LEFT(sign, self.bits - 1))

    def _special_codes(self) -> _SpecialCodes:
        top = ((1 << self.exponent_bits) - 1) << self.mantissa_bits
        ones = top | ((1 << self.mantissa_bits) - 1)
        return {
            "ieee": _SpecialCodes(top, top | (1 << self.mantissa_bits) >> 1, True, False, top),
            "p3109": _SpecialCodes(ones, 0, False, True, ones),
            "fn": _SpecialCodes(ones, ones, True, False, ones - 1),
            "fnuz": _SpecialCodes(ones, 0, False, True, ones),
            "finite": _SpecialCodes(ones, 0, True, True, ones),
        }[self.kind]

    def values_of(self, codes: Tensor) -> Tensor:
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
        if not self.has_negative_zero:
            is_nan = EQ(AND(codes, (1 << self.bits) - 1), 1 << (self.bits - 1))
            values = values.masked_fill_(is_nan, math.nan)
        return OR(values.view(torch.int64), LEFT(sign, 63)).view(torch.float64)

    def coding(self, binary: Binary, keeps_sign_of_nan: bool = True) -> Coding:
        mantissa, dropped = self.mantissa_bits, binary.mantissa - self.mantissa_bits
        is_lifted = self.min_exponent > 1 - binary.bias
        power = math.ldexp(1.0, self.min_exponent + dropped) if is_lifted else 1.0
        step = self.smallest_subnormal if self.subnormals and is_lifted else 0.0
        special = self._special_codes()
        spec = integers(
            dropped,
            (binary.bias - self.exponent_bias) << mantissa,
            (self.min_exponent + binary.bias) << binary.mantissa if is_lifted else 0,
            binary.bits_of(power),
            self.bits - 1,
            special.infinity,
            special.nan,
            special.keeps_sign and keeps_sign_of_nan,
            special.flips_sign,
            (1 << (self.bits - 1)) - 1,
            1 << mantissa if is_lifted or not self.subnormals else 0,
            binary.bits_of(step),
            special.infinity if self.has_inf else -1,
            special.last,
            -1 if self.has_negative_zero else binary.sign,
        )
        # A subnormal step is 0 if the processor flushes subnormals.
        is_normal = step == 0 or step >= math.ldexp(1.0, 1 - binary.bias)
        return Coding("float", spec, can_decode=is_normal)


class _SpecialCodes(NamedTuple):
    """Codes without sign: of infinity, or all ones; of NaN, and whether its sign is kept and flipped."""

    infinity: int
    nan: int
    keeps_sign: bool
    flips_sign: bool
    last: int  # codes above are NaN, except infinity


# --- rounding, by addition or on the bits ---------------------------------------------------------


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
        binary = self.binary
        bits = x.view(binary.integer)
        unit, is_flushed = self.unit, self.lowest_unit > self.unit
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
