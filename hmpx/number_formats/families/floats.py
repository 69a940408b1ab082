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
from ..unpatched import ADD, AND, CLAMP, DIV, EQ, GE, GT, LEFT, LT, MUL, OR, RIGHT, SUB, WHERE
from ..vocabulary import Overflow
from .number_format import (
    CodedFormat,
    Coding,
    Figures,
    Kernel,
    Params,
    check_int,
    check_name,
    kernel_of,
    packed,
)

Kind: TypeAlias = Literal["ieee", "p3109", "fn", "fnuz", "finite"]


class _Traits(NamedTuple):
    overflows: tuple[Overflow, ...]  # the supported overflow behaviours; the default first
    has_negative_zero: bool  # if not, its code is the only NaN
    may_be_powers: bool  # may have no mantissa bits: codes of the largest exponent are numbers
    reserved: int  # how many of the last codes are not numbers, if the exponent is not reserved
    sign_of_nan: tuple[bool, bool]  # whether its code keeps the sign, and flips it


_KINDS: Final[dict[str, _Traits]] = {
    "ieee": _Traits(("inf", "nan", "saturate"), True, False, 0, (True, False)),
    "p3109": _Traits(("inf", "nan", "saturate"), False, False, 1, (False, True)),
    "fn": _Traits(("nan", "saturate"), True, False, 1, (True, False)),
    "fnuz": _Traits(("nan", "saturate"), False, True, 0, (False, True)),
    "finite": _Traits(("saturate",), True, True, 0, (True, True)),
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
        kind: Which codes are infinities and NaN: ``"ieee"``, ``"p3109"``, ``"fn"``, ``"fnuz"`` or
            ``"finite"``; see [kinds](formats.md#formats-of-ones-own).
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

    def params(self, dtype: torch.dtype, mode: str, overflow: str | None) -> Params:
        info = torch.finfo(dtype)
        is_kept = (overflow or self.default_overflow) == "inf" and (
            self.subnormals
            and self.has_negative_zero
            and self.max >= info.max
            and self.epsilon <= info.eps
            and self.smallest_normal <= info.smallest_normal
        )
        return None if is_kept else super().params(dtype, mode, overflow)

    def params_in(self, binary: Binary, mode: str, overflow: Overflow) -> FloatParams:
        return FloatParams(
            binary, mode, dropped=binary.mantissa - self.mantissa_bits,
            lowest=(self.min_exponent + binary.bias) << binary.mantissa,
            highest=(self.max_exponent + 1 + binary.bias) << binary.mantissa,
            beyond={"inf": math.inf, "nan": math.nan, "saturate": self.max}[overflow],
            max=self.max, subnormals=self.subnormals, has_negative_zero=self.has_negative_zero,
        )  # fmt: skip

    def round(self, x: Tensor, noise: Tensor | None, p: FloatParams) -> Tensor:
        binary = p.binary
        bits = x.view(binary.integer)
        whole = AND(bits, binary.magnitude)
        has_own_range = p.lowest == 1 << binary.mantissa
        rounded = (_by_cutting if has_own_range else _by_adding)(bits, whole, noise, p)
        found = _bounded(bits, whole, rounded, p).view(binary.integer)
        sign = AND(bits, binary.sign)
        if not p.has_negative_zero:
            sign = sign.bitwise_and_(ones_if_positive(found, binary))
        return OR(found, sign).view(binary.dtype)

    def kernel(self, p: FloatParams) -> Kernel:
        place, ends = p.binary.mantissa, (p.max, p.beyond, p.has_negative_zero)
        if p.lowest == 1 << place:
            unit = 1 << p.dropped
            return kernel_of(
                "bits", p, unit, unit if p.subnormals else 1 << place, *ends, p.dropped
            )
        lift = p.dropped << place
        lowest_power = p.lowest + (lift if p.subnormals else place << place)
        return kernel_of("float", p, p.lowest, p.highest, lift, lowest_power, *ends)

    def _codes_in(self, binary: Binary) -> FloatCodes:
        mantissa, dropped = self.mantissa_bits, binary.mantissa - self.mantissa_bits
        is_lifted = self.min_exponent > 1 - binary.bias
        ones = (1 << (self.bits - 1)) - 1
        infinity, nan, last = (ones, ones, ones - 1) if self.kind == "fn" else (ones, 0, ones)
        if self.kind == "ieee":
            infinity = last = ones >> mantissa << mantissa
            nan = infinity | (1 << mantissa) >> 1
        keeps, flips = _KINDS[self.kind].sign_of_nan
        return FloatCodes(
            dropped=dropped,
            rebias=(binary.bias - self.exponent_bias) << mantissa,
            low_limit=(self.min_exponent + binary.bias) << binary.mantissa if is_lifted else 0,
            low_power=math.ldexp(1.0, self.min_exponent + dropped) if is_lifted else 1.0,
            sign_place=self.bits - 1,
            infinity=infinity,
            nan=nan,
            keeps_sign_of_nan=keeps,
            flips_sign_of_nan=flips,
            mask=ones,
            first_normal=1 << mantissa if is_lifted or not self.subnormals else 0,
            step=self.smallest_subnormal if self.subnormals and is_lifted else 0.0,
            infinite=infinity if self.has_inf else -1,
            last_number=last,
            nan_code=-1 if self.has_negative_zero else binary.sign,
        )

    def codes_of(self, rounded: Tensor, binary: Binary) -> Tensor:
        c, bits = self._codes_in(binary), rounded.view(binary.integer)
        whole = AND(bits, binary.magnitude)
        codes = RIGHT(whole, c.dropped).sub_(c.rebias)
        if c.low_limit:
            # Adding a power of two leaves multiples of the smallest number in the lowest bits.
            low = ADD(whole.view(binary.dtype), c.low_power).view(binary.integer)
            codes = WHERE(LT(whole, c.low_limit), low.sub_(binary.bits_of(c.low_power)), codes)
        sign = AND(RIGHT(bits, binary.width - 1), 1)
        is_nan = GT(whole, binary.infinity)
        codes = codes.masked_fill_(EQ(whole, binary.infinity), c.infinity)
        codes = codes.masked_fill_(is_nan, c.nan)
        if c.flips_sign_of_nan:
            sign = WHERE(is_nan, SUB(1, sign) if c.keeps_sign_of_nan else 1, sign)
        return OR(codes, LEFT(sign, c.sign_place))

    def values_of(self, codes: Tensor) -> Tensor:
        c = self._codes_in(FP64)
        whole, sign = AND(codes, c.mask), LEFT(RIGHT(codes, c.sign_place), 63)
        low = MUL(whole.to(torch.float64), c.step).view(torch.int64)
        bits = WHERE(LT(whole, c.first_normal), low, LEFT(ADD(whole, c.rebias), c.dropped))
        bits = bits.masked_fill_(EQ(whole, c.infinite), FP64.infinity)
        bits = bits.masked_fill_(GT(whole, c.last_number), FP64.nan)
        bits = bits.masked_fill_(EQ(OR(whole, sign), c.nan_code), FP64.nan)
        return OR(bits, sign).view(torch.float64)

    def coding(self, binary: Binary, keeps_sign_of_nan: bool = True) -> Coding:
        codes = self._codes_in(binary)
        # A subnormal step is 0 if the processor flushes subnormals.
        is_normal = codes.step == 0 or codes.step >= math.ldexp(1.0, 1 - binary.bias)
        if not keeps_sign_of_nan:
            codes = codes._replace(keeps_sign_of_nan=False)
        return Coding("float", packed(binary, codes), can_decode=is_normal)


class FloatCodes(NamedTuple):
    """The numbers with which floats of one type get codes, and codes values: ``float_codes`` of the kernels."""

    dropped: int  # mantissa bits of the type that the format lacks
    rebias: int  # the difference of the biases, in the place of a code's exponent
    low_limit: int  # the bits of the smallest number with an exponent in its code; 0 if all have
    low_power: float  # if added to numbers below that, their codes are in the lowest bits
    sign_place: int
    infinity: int  # the code without sign, of infinity, or if there is none the last one
    nan: int
    keeps_sign_of_nan: bool
    flips_sign_of_nan: bool
    mask: int  # of a code without sign
    first_normal: int  # the code of ``low_limit``
    step: float  # between numbers below that
    infinite: int  # the code of infinity; -1 if there is none
    last_number: int  # larger codes are NaN
    nan_code: int  # a NaN with the code of -0, as bits of the type; -1 if there is none


# --- rounding ------------------------------------------------------------------------------------


class FloatParams(NamedTuple):
    """The numbers with which floats are rounded."""

    binary: Binary
    mode: str
    dropped: int  # mantissa bits of the compute type that the format lacks
    lowest: int  # the exponent field of the smallest normal number, in place
    highest: int  # the exponent field beyond the largest number, in place
    subnormals: bool
    max: float
    beyond: float  # replaces numbers beyond the largest: infinity, NaN or the largest
    has_negative_zero: bool


def _by_adding(bits: Tensor, whole: Tensor, noise: Tensor | None, p: FloatParams) -> Tensor:
    """Returns magnitudes rounded by adding the power of two that leaves the wanted number of bits."""
    binary, lift = p.binary, p.dropped << p.binary.mantissa
    power = AND(bits, binary.infinity)
    if p.subnormals:
        power = CLAMP(power, p.lowest, p.highest).add_(lift)
    else:
        lifted = CLAMP(power, max=p.highest).add_(lift)
        lowest_power = p.lowest + (binary.mantissa << binary.mantissa)
        power = WHERE(LT(power, p.lowest), lowest_power, lifted)
    power = power.view(binary.dtype)
    magnitude = whole.view(binary.dtype)
    if p.mode == "nearest":
        return magnitude.add_(power).sub_(power)
    nearest = SUB(ADD(magnitude, power), power)
    found = nearest.view(binary.integer)  # compared as integers: no denormals are flushed
    step = MUL(power, math.ldexp(1.0, -binary.mantissa))
    if p.mode == "nearest_away":
        is_tie = EQ(SUB(magnitude, nearest), MUL(step, 0.5))
        return WHERE(is_tie, ADD(nearest, step), nearest)
    below = WHERE(GT(found, whole), SUB(nearest, step), nearest)
    if p.mode == "toward_zero":
        return below
    if p.mode == "stochastic":
        assert noise is not None
        is_above = GE(DIV(SUB(magnitude, below), step), uniform(noise, binary))
    else:
        is_above = AND(may_grow(bits, p.mode), LT(below.view(binary.integer), whole))
    return WHERE(is_above, ADD(below, step), below)


def _by_cutting(bits: Tensor, whole: Tensor, noise: Tensor | None, p: FloatParams) -> Tensor:
    """Returns magnitudes rounded by cutting bits, for formats with the exponent range of the compute type."""
    rounded = cut(bits, whole, p.dropped, noise, p)
    if not p.subnormals:
        lowest = cut(bits, whole, p.binary.mantissa, noise, p)
        rounded = WHERE(LT(whole, p.lowest), lowest, rounded)
    return WHERE(GT(whole, p.binary.infinity), whole, rounded).view(p.binary.dtype)  # NaN


def cut(bits: Tensor, whole: Tensor, places: int, noise: Tensor | None, p: Params) -> Tensor:
    """Returns ``whole``, the magnitude of ``bits``, rounded to multiples of ``2**places``."""
    if places == 0:
        return whole
    half, ones = 1 << (places - 1), (1 << places) - 1
    if p.mode == "nearest":
        is_odd = RIGHT(whole, places).bitwise_and_(1)
        added = is_odd.add_(half - 1).add_(whole)
    elif p.mode == "nearest_away":
        added = ADD(whole, half)
    elif p.mode == "stochastic":
        assert noise is not None
        added = ADD(whole, AND(wide(noise) if p.binary.width == 64 else noise, ones))
    elif p.mode == "toward_zero":
        added = whole
    else:
        added = WHERE(may_grow(bits, p.mode), ADD(whole, ones), whole)
    return AND(added, ~ones)


def _bounded(bits: Tensor, whole: Tensor, rounded: Tensor, p: FloatParams) -> Tensor:
    """Returns rounded magnitudes, with those beyond the largest replaced."""
    if p.beyond == p.max:
        return CLAMP(rounded, max=p.max)
    is_over = GT(rounded, p.max)
    if p.mode not in ("nearest", "nearest_away", "stochastic"):
        # Towards zero, numbers stop at the largest; only infinity is beyond.
        goes_beyond = EQ(whole, p.binary.infinity)
        if p.mode != "toward_zero":
            goes_beyond = OR(goes_beyond, may_grow(bits, p.mode))
        is_over = AND(is_over, goes_beyond)
        rounded = CLAMP(rounded, max=p.max)
    return rounded.masked_fill_(is_over, p.beyond)
