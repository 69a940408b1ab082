"""Rounding to number formats in torch ops: exact, on any device, and traceable.

A plan is made once for a format, a rounding mode and a binary type to compute in; its ``round``
takes and returns tensors of that type. Works on the bits: compilers leave out casts there and back.
Knows nothing of autograd, layouts and other dtypes than the two that it computes in.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, fields
from fractions import Fraction
from itertools import pairwise
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch import Tensor

from ..arguments import is_a
from ..errors import shown
from ..tensors import Constant
from .families import Block, Custom, Fixed, Float, Format, Overflow, Posit, Table

#: In the order of the compiled kernels' numbers.
ROUNDING_MODES: Final = ("nearest", "toward_zero", "up", "down", "nearest_away", "stochastic")

# As they were before anything was patched: op lists may hold any of them. Methods that end in "_"
# may be listed, too, but in-place ops keep their tensor's dtype whatever the lists say.
_ADD, _SUB, _MUL, _DIV = torch.add, torch.sub, torch.mul, torch.div
_WHERE, _BUCKETIZE, _TAKE = torch.where, torch.bucketize, torch.take
_AND, _OR, _XOR = torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor
_LEFT, _RIGHT = torch.bitwise_left_shift, torch.bitwise_right_shift
_ABS, _FLOOR, _TRUNC = torch.abs, torch.floor, torch.trunc
_AMAX, _CLAMP, _PAD = torch.amax, torch.clamp, torch.constant_pad_nd
_EQ, _GT, _LT, _GE, _NE = torch.eq, torch.gt, torch.lt, torch.ge, torch.ne

Key: TypeAlias = "int | Tensor"


@dataclass(frozen=True)
class Binary:
    """A binary type to compute in, and where its fields are.

    Attributes:
        dtype: The floating type.
        integer: The integer type of the same width.
        mantissa: Bits of the mantissa field.
        bias: Of the exponent field.
    """

    dtype: torch.dtype
    integer: torch.dtype
    mantissa: int
    bias: int

    @property
    def width(self) -> int:
        """Bits in all."""
        return 32 if self.mantissa == 23 else 64

    @property
    def sign(self) -> int:
        """The sign's bit, as a signed integer."""
        return ~self.magnitude

    @property
    def magnitude(self) -> int:
        """All bits but the sign's."""
        return (1 << (self.width - 1)) - 1

    @property
    def infinity(self) -> int:
        """The bits of infinity, which are those of the exponent field."""
        return self.magnitude & -(1 << self.mantissa)

    @property
    def nan(self) -> int:
        """The bits of a NaN."""
        return self.infinity | (1 << (self.mantissa - 1))

    def bits_of(self, value: float) -> int:
        """Returns the bits of a value that is not negative."""
        pack, unpack = ("<f", "<i") if self.mantissa == 23 else ("<d", "<q")
        found: int = struct.unpack(unpack, struct.pack(pack, value))[0]
        return found

    def floor(self, value: Fraction) -> float:
        """Returns the largest number of this type that is not above ``value``."""
        if self.mantissa == 52:
            near = float(value)
            return math.nextafter(near, -math.inf) if Fraction(near) > value else near
        near = to_float32(float(value))
        while Fraction(near) > value:
            near = self.before(near)
        return near

    def before(self, value: float) -> float:
        """Returns the next number towards minus infinity."""
        if self.mantissa == 52:
            return math.nextafter(value, -math.inf)
        bits = self.bits_of(abs(value))
        if value == 0:
            return -_from_bits32(1)
        return _from_bits32(bits - 1) if value > 0 else -_from_bits32(bits + 1)


FP32: Final = Binary(torch.float32, torch.int32, 23, 127)
FP64: Final = Binary(torch.float64, torch.int64, 52, 1023)


class Plan(Protocol):
    """How to round to one format."""

    @property
    def binary(self) -> Binary:
        """What it computes in."""

    @property
    def mode(self) -> str:
        """The rounding mode."""

    def round(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """Returns the values of ``x`` rounded, as a new tensor.

        Args:
            x: Of the plan's binary dtype.
            noise: Random int32 of x's shape; only for the mode ``"stochastic"``.
        """


@dataclass(frozen=True)
class FloatPlan:
    """Floats whose rounding is an addition: of the power of two that leaves as many bits as wanted.

    Attributes:
        binary: What it computes in.
        mode: The rounding mode.
        mantissa: Mantissa bits of the format.
        min_exponent: That of its smallest normal number.
        max_exponent: That of its largest number.
        max: Its largest number.
        beyond: What becomes of numbers beyond: infinity, NaN or the largest.
        has_subnormals: Or else below the smallest normal number is zero only.
        has_negative_zero: Or else there is one zero.
    """

    binary: Binary
    mode: str
    mantissa: int
    min_exponent: int
    max_exponent: int
    max: float
    beyond: float
    has_subnormals: bool
    has_negative_zero: bool

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
        """From an exponent to that of the power of two to add, in place."""
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
        power = _AND(bits, binary.infinity)
        if self.has_subnormals:
            power = _CLAMP(power, self.lowest, self.highest).add_(self.lift)
        else:
            lifted = _CLAMP(power, max=self.highest).add_(self.lift)
            power = _WHERE(_LT(power, self.lowest), self.lowest_power, lifted)
        power = power.view(binary.dtype)
        whole = _AND(bits, binary.magnitude)
        magnitude = whole.view(binary.dtype)
        if self.mode == "nearest":
            rounded = magnitude.add_(power).sub_(power)
        else:
            rounded = self._directed(bits, whole, power, noise)
        rounded = self._bounded(bits, rounded)
        found = rounded.view(binary.integer)
        sign = _AND(bits, binary.sign)
        if not self.has_negative_zero:
            sign = sign.bitwise_and_(_all_ones_if_positive(found, binary))
        return _OR(found, sign).view(binary.dtype)

    def _directed(self, bits: Tensor, whole: Tensor, power: Tensor, noise: Tensor | None) -> Tensor:
        """Returns magnitudes rounded otherwise than to the nearest even, by steps from there."""
        binary = self.binary
        magnitude = whole.view(binary.dtype)
        nearest = _SUB(_ADD(magnitude, power), power)
        found = nearest.view(binary.integer)  # compared as integers: no denormals are flushed
        step = _MUL(power, math.ldexp(1.0, -binary.mantissa))
        if self.mode == "nearest_away":
            is_tie = _EQ(_SUB(magnitude, nearest), _MUL(step, 0.5))
            return _WHERE(is_tie, _ADD(nearest, step), nearest)
        if self.mode == "stochastic":
            assert noise is not None
            below = _WHERE(_GT(found, whole), _SUB(nearest, step), nearest)
            share = _DIV(_SUB(magnitude, below), step)
            return _WHERE(_GE(share, _uniform(noise, binary)), _ADD(below, step), below)
        is_below, is_above = _LT(found, whole), _GT(found, whole)
        if self.mode == "toward_zero":
            return _WHERE(is_above, _SUB(nearest, step), nearest)
        grows = _GE(bits, 0) if self.mode == "up" else _LT(bits, 0)
        rounded = _WHERE(_AND(is_below, grows), _ADD(nearest, step), nearest)
        return _WHERE(_AND(is_above, ~grows), _SUB(nearest, step), rounded)

    def _bounded(self, bits: Tensor, rounded: Tensor) -> Tensor:
        """Returns magnitudes with those beyond the largest replaced; may change ``rounded``."""
        if self.beyond == self.max:
            return _CLAMP(rounded, max=self.max)
        if self.mode in ("nearest", "nearest_away", "stochastic"):
            # Infinity where it is beyond, or else 0: by arithmetic, since comparing and choosing take
            # far longer where no compiler fuses them.
            huge = math.ldexp(1.0, self.binary.bias)
            excess = _CLAMP(_SUB(rounded, self.max), min=0.0).mul_(huge).mul_(huge)
            if self.beyond != math.inf:
                excess = _SUB(excess, excess)  # NaN
            return rounded.add_(excess)
        # What is rounded towards zero ends at the largest number; only infinity is beyond.
        is_inf = _EQ(_AND(bits, self.binary.magnitude), self.binary.infinity)
        goes_beyond = is_inf
        if self.mode != "toward_zero":
            grows = _GE(bits, 0) if self.mode == "up" else _LT(bits, 0)
            goes_beyond = _OR(is_inf, grows)
        is_over = _GT(rounded, self.max)
        rounded = _CLAMP(rounded, max=self.max)
        return rounded.masked_fill_(_AND(is_over, goes_beyond), self.beyond)


@dataclass(frozen=True)
class BitsPlan:
    """Floats with the exponents of the type that is computed in: bits are added and cut off.

    Attributes:
        binary: What it computes in.
        mode: The rounding mode.
        mantissa: Mantissa bits of the format.
        max: The bits of its largest number.
        beyond: The bits of what becomes of numbers beyond: infinity, NaN or the largest.
        has_subnormals: Or else below the smallest normal number is zero only.
        has_negative_zero: Or else there is one zero.
    """

    binary: Binary
    mode: str
    mantissa: int
    max: int
    beyond: int
    has_subnormals: bool
    has_negative_zero: bool

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
            rounded = _RIGHT(bits, binary.mantissa - self.mantissa).bitwise_and_(1)
            rounded = rounded.add_((self.unit >> 1) - 1).add_(bits).bitwise_and_(-self.unit)
            is_nan = _all_ones_if_positive(
                _AND(bits, binary.magnitude).sub_(binary.infinity), binary
            )
            return _XOR(_XOR(rounded, bits).bitwise_and_(is_nan), rounded).view(binary.dtype)
        whole = _AND(bits, binary.magnitude)
        rounded = self._cut(bits, whole, self.unit, noise)
        if not self.has_subnormals:
            is_low = _LT(whole, 1 << binary.mantissa)
            rounded = _WHERE(is_low, self._cut(bits, whole, self.lowest_unit, noise), rounded)
        rounded = self._bounded(bits, whole, rounded)
        rounded = _WHERE(_GT(whole, binary.infinity), whole, rounded)  # NaN
        sign = _AND(bits, binary.sign)
        if not self.has_negative_zero:
            sign = _WHERE(_EQ(rounded, 0), 0, sign)
        return _OR(rounded, sign).view(binary.dtype)

    def _cut(self, bits: Tensor, whole: Tensor, unit: int, noise: Tensor | None) -> Tensor:
        """Returns the bits of magnitudes, rounded to multiples of ``unit``."""
        if unit == 1:
            return whole
        half = unit >> 1
        if self.mode == "nearest":
            is_odd = _RIGHT(whole, unit.bit_length() - 1).bitwise_and_(1)
            added = is_odd.add_(half - 1).add_(whole)
        elif self.mode == "nearest_away":
            added = _ADD(whole, half)
        elif self.mode == "stochastic":
            assert noise is not None
            if self.binary.mantissa == 52:
                low = _AND(noise.to(torch.int64), 0xFFFFFFFF)
                noise = _OR(_LEFT(low, 32), low)
            added = _ADD(whole, _AND(noise, unit - 1))
        elif self.mode == "toward_zero":
            added = whole
        else:
            grows = _GE(bits, 0) if self.mode == "up" else _LT(bits, 0)
            added = _WHERE(grows, _ADD(whole, unit - 1), whole)
        return _AND(added, -unit)

    def _bounded(self, bits: Tensor, whole: Tensor, rounded: Tensor) -> Tensor:
        if self.beyond == self.max:
            return _CLAMP(rounded, max=self.max)
        is_over = _GT(rounded, self.max)
        if self.mode in ("nearest", "nearest_away", "stochastic"):
            return rounded.masked_fill(is_over, self.beyond)
        goes_beyond = _EQ(whole, self.binary.infinity)
        if self.mode != "toward_zero":
            grows = _GE(bits, 0) if self.mode == "up" else _LT(bits, 0)
            goes_beyond = _OR(goes_beyond, grows)
        rounded = _CLAMP(rounded, max=self.max)
        return rounded.masked_fill_(_AND(is_over, goes_beyond), self.beyond)


@dataclass(frozen=True)
class PositPlan:
    """Posits: exponent and mantissa of a number are cut where the regime leaves no bits for them.

    Attributes:
        binary: What it computes in.
        mode: The rounding mode.
        bits: Of a code.
        es: Bits of the exponent field.
        keeps_inf: Infinities become NaR, thus NaN, or else the largest number.
    """

    binary: Binary
    mode: str
    bits: int
    es: int
    keeps_inf: bool

    @property
    def max_exponent(self) -> int:
        """That of the largest number; the negative of that of the smallest."""
        return (self.bits - 2) << self.es

    @property
    def most(self) -> int:
        """The bits of the largest number."""
        return (self.binary.bias + self.max_exponent) << self.binary.mantissa

    @property
    def least(self) -> int:
        """The bits of the smallest positive number."""
        return (self.binary.bias - self.max_exponent) << self.binary.mantissa

    @property
    def last(self) -> int:
        """The largest bits of a number that is none of NaN and, unless it saturates, infinity."""
        return self.binary.infinity - self.keeps_inf

    @property
    def parity(self) -> int:
        """What makes the place above the exponent field as odd as the end of the longest regimes.

        Those of numbers above 1 end in 0, of others in 1; the largest regimes are ``bits - 3`` and
        ``2 - bits``.
        """
        return 1 << (self.binary.mantissa + self.es) if self.bits % 2 == 0 else 0

    def round(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """Returns the values of ``x`` rounded."""
        binary = self.binary
        bits = x.view(binary.integer)
        whole = _AND(bits, binary.magnitude)
        start = binary.bias << binary.mantissa
        scaled = _CLAMP(whole, self.least, self.most).sub_(start)
        regime = _RIGHT(scaled, binary.mantissa + self.es)
        # Regimes k and -k - 1 take equally many bits.
        length = _CLAMP(_XOR(regime, _RIGHT(regime, 31)), max=self.bits - 3)
        shift = length.add_(binary.mantissa + self.es + 3 - self.bits)
        unit = _LEFT(1, shift)
        if self.mode == "nearest":
            is_odd = _RIGHT(_ADD(scaled, self.parity), shift).bitwise_and_(1)
            added = _RIGHT(unit, 1).sub_(1).add_(is_odd).add_(scaled)
        elif self.mode == "nearest_away":
            added = _RIGHT(unit, 1).add_(scaled)
        elif self.mode in ("up", "down"):
            grows = _GE(bits, 0) if self.mode == "up" else _LT(bits, 0)
            added = _WHERE(grows, _ADD(scaled, unit).sub_(1), scaled)
        else:
            added = scaled
        rounded = _CLAMP(_AND(added, -unit).add_(start), max=self.most)
        if self.mode not in ("nearest", "nearest_away"):
            # Only these two never round to zero.
            is_tiny = _LT(whole, self.least)
            if self.mode == "stochastic":
                rounded = self._drawn(whole, rounded, unit, is_tiny, noise)
            else:
                if self.mode in ("up", "down"):
                    is_tiny = _AND(is_tiny, ~grows)
                rounded = rounded.masked_fill_(is_tiny, 0)
        rounded = _AND(rounded, _all_ones_if_positive(whole, binary))
        is_nan = _all_ones_if_positive(_SUB(whole, self.last), binary)
        rounded = rounded.bitwise_or_(is_nan.bitwise_and_(binary.nan))
        sign = _AND(bits, binary.sign).bitwise_and_(_all_ones_if_positive(rounded, binary))
        return rounded.bitwise_or_(sign).view(binary.dtype)

    def _drawn(
        self, whole: Tensor, rounded: Tensor, unit: Tensor, is_tiny: Tensor, noise: Tensor | None
    ) -> Tensor:
        """Returns the bits of one of the neighbours, by chance in proportion to how near they are."""
        assert noise is not None
        binary = self.binary
        below = rounded.masked_fill(is_tiny, 0)
        above = _WHERE(is_tiny, self.least, _ADD(rounded, unit))
        low, high = below.view(binary.dtype), above.view(binary.dtype)
        magnitude = _CLAMP(whole, max=self.most).view(binary.dtype)
        share = _DIV(_SUB(magnitude, low), _SUB(high, low))
        return _WHERE(_GE(share, _uniform(noise, binary)), above, below)


@dataclass(frozen=True)
class FixedPlan:
    """Fixed point.

    Attributes:
        binary: What it computes in.
        mode: The rounding mode.
        bits: Of a code.
        fraction: Bits after the point.
    """

    binary: Binary
    mode: str
    bits: int
    fraction: int

    def round(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """Returns the values of ``x`` rounded."""
        scaled = _MUL(x, math.ldexp(1.0, self.fraction))
        if self.mode == "nearest":
            whole = scaled.round_()
        elif self.mode == "toward_zero":
            whole = scaled.trunc_()
        elif self.mode == "up":
            whole = scaled.ceil_()
        elif self.mode == "down":
            whole = scaled.floor_()
        elif self.mode == "nearest_away":
            whole = _TRUNC(scaled)
            is_half = _GE(_ABS(_SUB(scaled, whole)), 0.5)
            away = _WHERE(_LT(scaled, 0), _SUB(whole, 1.0), _ADD(whole, 1.0))
            whole = _WHERE(is_half, away, whole)
        else:
            assert noise is not None
            whole = _FLOOR(scaled)
            is_drawn = _GE(_SUB(scaled, whole), _uniform(noise, self.binary))
            whole = _WHERE(is_drawn, _ADD(whole, 1.0), whole)
        most = (1 << (self.bits - 1)) - 1
        whole = _CLAMP(whole, -most - 1, most).mul_(math.ldexp(1.0, -self.fraction))
        bits = whole.view(self.binary.integer)  # compilers may take -0 for 0
        return bits.masked_fill_(_EQ(whole, 0), 0).view(self.binary.dtype)


@dataclass(frozen=True)
class TablePlan:
    """Formats given by their values.

    Attributes:
        binary: What it computes in.
        mode: The rounding mode.
        values: As they are in that type.
        thresholds: Between neighbours: the largest number that is rounded to the lower.
    """

    binary: Binary
    mode: str
    values: tuple[float, ...]
    thresholds: tuple[float, ...]

    def round(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """Returns the values of ``x`` rounded."""
        values = self._constant("values", self.values, x)
        index = self.index(x)
        rounded = _TAKE(values, index)
        if self.mode == "stochastic":
            assert noise is not None
            above = _TAKE(values, _CLAMP(_ADD(index, 1), max=len(self.values) - 1))
            share = _DIV(_SUB(x, rounded), _SUB(above, rounded))
            rounded = _WHERE(_GE(share, _uniform(noise, self.binary)), above, rounded)
        return _WHERE(_NE(x, x), x, rounded)

    def index(self, x: Tensor) -> Tensor:
        """Returns the index of each rounded value; the lower one if the mode is stochastic."""
        return _BUCKETIZE(x, self._constant("thresholds", self.thresholds, x))

    def _constant(self, name: str, numbers: tuple[float, ...], like: Tensor) -> Tensor:
        """Returns ``numbers`` on the device of ``like`` and in its dtype, the one to compute in."""
        dtype = self.binary.dtype
        if torch.compiler.is_dynamo_compiling():
            return torch.tensor(numbers, dtype=dtype, device=like.device)
        constants: dict[str, Constant] = vars(self).setdefault("_constants", {})
        constant = constants.get(name)
        if constant is None:
            made = Constant(lambda device: torch.tensor(numbers, dtype=dtype, device=device))
            constant = constants.setdefault(name, made)
        return constant.on(like.device)


@dataclass(frozen=True)
class BlockPlan:
    """Blocks with a shared power of two.

    Attributes:
        binary: What it computes in.
        mode: The rounding mode.
        element: How the elements are rounded, divided by their scale.
        size: Elements of a block.
    """

    binary: Binary
    mode: str
    element: FloatPlan
    size: int

    def round(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """Returns the values of ``x`` rounded; blocks lie along its last dimension."""
        # x: [..., k] -> blocks: [..., ceil(k / size), size]
        length = x.shape[-1]
        blocks = self.split(x)
        if noise is not None:
            noise = self.split(noise)
        exponent, is_bad = self.exponents(blocks)
        elements = self.scaled(blocks, exponent, noise)
        result = _MUL(elements, self._power(exponent).masked_fill_(is_bad, math.nan))
        return result.reshape(*x.shape[:-1], -1)[..., :length]

    def split(self, x: Tensor) -> Tensor:
        """Returns ``x`` in blocks, the last one of each row filled up with zeros."""
        length = x.shape[-1]
        if missing := -length % self.size:
            x = _PAD(x, (0, missing))
        return x.reshape(*x.shape[:-1], (length + missing) // self.size, self.size)

    def exponents(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the shared exponents, and whether a block holds infinity or NaN: [..., n, 1]."""
        binary = self.binary
        most = _AMAX(_AND(blocks.view(binary.integer), binary.magnitude), -1, True)
        exponent = _RIGHT(most, binary.mantissa).sub_(binary.bias + self.element.max_exponent)
        return _CLAMP(exponent, -127, 127), _GE(most, binary.infinity)

    def scaled(self, blocks: Tensor, exponent: Tensor, noise: Tensor | None) -> Tensor:
        """Returns the elements: ``blocks`` divided by their scale, rounded."""
        binary = self.binary
        scaled = _MUL(blocks, self._power(-exponent))
        if self.mode in ("up", "down"):
            # What the division made zero was not.
            bits = blocks.view(binary.integer)
            least = (binary.bias - 126) << binary.mantissa
            tiny = _OR(_AND(bits, binary.sign), least).view(binary.dtype)
            is_lost = _LT(_AND(scaled.view(binary.integer), binary.magnitude), least)
            is_lost = _AND(is_lost, _NE(_AND(bits, binary.magnitude), 0))
            scaled = _WHERE(is_lost, tiny, scaled)
        return self.element.round(scaled, noise)

    def _power(self, exponent: Tensor) -> Tensor:
        """Returns 2**exponent."""
        binary = self.binary
        bits = _LEFT(_ADD(exponent, binary.bias), binary.mantissa)
        if binary.mantissa == 23:
            bits = bits.masked_fill_(_EQ(bits, 0), 1 << 22)  # 2**-127 is subnormal
        return bits.view(binary.dtype)


def plan(format: Format, dtype: torch.dtype, mode: str, overflow: Overflow) -> Plan | None:
    """Returns how to round tensors of ``dtype`` to a format; None if nothing is to do.

    Args:
        format: Any but a `Custom` one.
        dtype: A floating type.
        mode: One of `MODES`.
        overflow: What becomes of values beyond the largest.
    """
    if _is_identity(format, dtype, overflow):
        return None
    binary = FP64 if dtype is torch.float64 or not _fits_float32(format) else FP32
    if isinstance(format, Float):
        return _plan_float(format, binary, mode, overflow)
    if isinstance(format, Posit):
        return PositPlan(binary, mode, format.bits, format.es, overflow != "saturate")
    if isinstance(format, Fixed):
        return FixedPlan(binary, mode, format.bits, format.fraction_bits)
    if isinstance(format, Block):
        element = _plan_float(format.element, binary, mode, "saturate")
        assert isinstance(element, FloatPlan)
        return BlockPlan(binary, mode, element, format.size)
    assert isinstance(format, Table)
    values = format.values if binary is FP64 else tuple(map(to_float32, format.values))
    return TablePlan(binary, mode, values, _thresholds(values, binary, mode))


def constants_of(plan: Plan | None) -> tuple[Any, ...]:
    """Returns a plan as numbers, strings and tuples, which is what a compiler takes for constant."""
    if plan is None:
        return ()
    values = (getattr(plan, field.name) for field in fields(plan))  # type: ignore[arg-type]
    return type(plan).__name__, *map(_constant, values)


def from_constants(kind: str, mantissa: int, *rest: Any) -> Plan:
    """Returns the plan that `constants_of` was given."""
    binary = FP32 if mantissa == 23 else FP64
    if kind == "BlockPlan":
        mode, element, size = rest
        return BlockPlan(binary, mode, FloatPlan(binary, *element[2:]), size)
    return _PLANS[kind](binary, *rest)


def _constant(value: Any) -> Any:
    if isinstance(value, Binary):
        return value.mantissa
    return constants_of(value) if isinstance(value, FloatPlan) else value


_PLANS: Final[dict[str, Callable[..., Plan]]] = {
    "FloatPlan": FloatPlan,
    "BitsPlan": BitsPlan,
    "PositPlan": PositPlan,
    "FixedPlan": FixedPlan,
    "TablePlan": TablePlan,
}


def random_bits(numel: int, start: int, keys: tuple[Key, Key], device: torch.device) -> Tensor:
    """Returns random int32, a hash of (index, keys).

    Args:
        numel: How many.
        start: The first one's index.
        keys: Two numbers or 0-dim tensors, int32.
        device: Where.
    """
    # An index has 32 bits, as many as an element of the result.
    index = torch.arange(numel, dtype=torch.int64, device=device).to(torch.int32)
    index = index.add_((start + 2**31) % 2**32 - 2**31)
    mixed = index.bitwise_xor_(keys[0])
    mixed = mixed.bitwise_xor_(_RIGHT(mixed, 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    mixed = mixed.bitwise_xor_(keys[1])
    mixed = mixed.bitwise_xor_(_RIGHT(mixed, 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - 2**32)
    return mixed.bitwise_xor_(_RIGHT(mixed, 16).bitwise_and_(0xFFFF))


def _all_ones_if_positive(number: Tensor, binary: Binary) -> Tensor:
    """Returns -1 where an integer is positive, else 0."""
    return number.neg().bitwise_right_shift_(binary.width - 1)


def _uniform(noise: Tensor, binary: Binary) -> Tensor:
    """Returns numbers above 0 and up to 1, as many different ones as the type holds exactly."""
    if binary.mantissa == 23:
        steps = _RIGHT(noise, 8).bitwise_and_(0xFFFFFF).add_(1)
        return _MUL(steps.to(binary.dtype), 2.0**-24)
    steps = _AND(noise.to(torch.int64), 0xFFFFFFFF).add_(1)
    return _MUL(steps.to(binary.dtype), 2.0**-32)


def _plan_float(format: Float, binary: Binary, mode: str, overflow: Overflow) -> Plan:
    beyond = {"inf": math.inf, "nan": math.nan, "saturate": format.max}[overflow]
    if format.min_exponent == 1 - binary.bias:
        return BitsPlan(
            binary,
            mode,
            format.mantissa_bits,
            binary.bits_of(format.max),
            binary.bits_of(beyond),
            format.subnormals,
            format.has_negative_zero,
        )
    return FloatPlan(
        binary,
        mode,
        format.mantissa_bits,
        format.min_exponent,
        format.max_exponent,
        format.max,
        beyond,
        format.subnormals,
        format.has_negative_zero,
    )


def _fits_float32(format: Format) -> bool:
    """Whether float32 has room for all values, and for what rounding adds."""
    if isinstance(format, Float):
        lowest, highest, mantissa = format.min_exponent, format.max_exponent, format.mantissa_bits
        if lowest == -126:
            return highest <= 127 and mantissa <= 23
        return mantissa <= 22 and lowest - mantissa - 1 >= -126 and highest + 24 - mantissa <= 127
    if isinstance(format, Posit):
        return format.bits - 3 - format.es <= 22 and format.max_exponent <= 125
    if isinstance(format, Fixed):
        return format.bits <= 25
    if isinstance(format, Table):
        return max(map(abs, format.values)) <= torch.finfo(torch.float32).max
    return True


def _is_identity(format: Format, dtype: torch.dtype, overflow: Overflow) -> bool:
    """Whether all values of ``dtype``, infinities and NaNs too, are values of ``format``."""
    if not isinstance(format, Float) or overflow != "inf" or not format.subnormals:
        return False
    info = torch.finfo(dtype)
    return (
        format.max >= info.max
        and format.epsilon <= info.eps
        and format.min_exponent <= math.frexp(info.smallest_normal)[1] - 1
    )


def _thresholds(values: tuple[float, ...], binary: Binary, mode: str) -> tuple[float, ...]:
    """Returns between neighbours the largest number that is rounded to the lower one."""
    found = []
    for index, (low, high) in enumerate(pairwise(values)):
        # Between neighbours on both sides of zero nothing is nearer to it: there the nearest counts.
        if mode in ("down", "stochastic") or (mode == "toward_zero" and low >= 0):
            found.append(binary.before(high))
        elif mode == "up" or (mode == "toward_zero" and high <= 0):
            found.append(low)
        else:
            middle = (Fraction(low) + Fraction(high)) / 2
            threshold = binary.floor(middle)
            is_even = index % 2 == 0
            if mode == "nearest_away" and middle:
                is_even = middle < 0
            if Fraction(threshold) == middle and not is_even:
                threshold = binary.before(threshold)
            found.append(threshold)
    return tuple(found)


def to_float32(value: float) -> float:
    """Returns the float32 nearest to ``value``, which is in its range."""
    found: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return found


def _from_bits32(bits: int) -> float:
    found: float = struct.unpack("<f", struct.pack("<i", bits))[0]
    return found


def check_mode(format: Format, mode: object) -> str | None:
    """Returns what is wrong with a rounding mode for a format; None if nothing is."""
    if not is_a(mode, str) or str.__str__(mode) not in ROUNDING_MODES:
        return f"rounding must be one of {', '.join(map(repr, ROUNDING_MODES))}, not {shown(mode)}"
    if isinstance(format, Custom) and str.__str__(mode) != "nearest":
        return f"format {format.name}: rounding can't be chosen, its own function rounds to it"
    return None
