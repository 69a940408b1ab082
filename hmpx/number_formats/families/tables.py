"""Tables: formats defined by their values."""

from __future__ import annotations

import math
import struct
from array import array
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ... import arguments
from ...errors import OptionError, raised_here, shown
from ...tensors import Constant
from ..bits import Binary, to_float32, uniform
from ..unpatched import ADD, BUCKETIZE, CLAMP, CONTIGUOUS, DIV, GE, NE, SUB, WHERE, taken
from ..vocabulary import ROUNDING_MODES, Overflow
from .number_format import (
    FLOAT32_MOST,
    CodedFormat,
    Coding,
    Figures,
    Kernel,
    check_name,
    params_of,
)

_MOST_VALUES: Final = 65536

#: Tables of up to this number of values are searched one by one.
SMALL_TABLE: Final = 16

#: Larger tables are indexed by upper bits: sign, exponent and 3 to 9 more.
_SHIFTS: Final = tuple(32 - upper for upper in range(12, 19))


class TableParams(NamedTuple):
    """The numbers with which tables are rounded."""

    binary: Binary
    mode: str
    values: tuple[float, ...]
    thresholds: tuple[float, ...]  # the largest numbers that round to the lower neighbour


@dataclass(frozen=True)
class Table(CodedFormat):
    """A format defined by its values; a code is a value's index.

    Attributes:
        name: An identifier.
        values: Ascending, finite, distinct; any sequence of numbers, kept as a tuple.

    Example:
        >>> ternary = hmpx.formats.Table("ternary", (-1.0, 0.0, 1.0))
        >>> hmpx.formats.quantize(torch.tensor([-0.7, 0.2, 3.0]), ternary)
        tensor([-1.,  0.,  1.])
    """

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        check_name(self.name)
        what = f"format {self.name}: values"
        given = arguments.items(what, self.values, "a sequence of numbers")
        try:
            values = tuple([float(value) for value in given])
        except raised_here(Exception):  # raised by a number-like object
            raise OptionError(f"{what} must be numbers, not {shown(self.values)}") from None
        if not 2 <= len(values) <= _MOST_VALUES:
            raise OptionError(
                f"format {self.name}: a table has 2 to {_MOST_VALUES} values, not {len(values)}"
            )
        for index, value in enumerate(values):
            if not math.isfinite(value):
                raise OptionError(
                    f"format {self.name}: values must be finite, but value {index} is {value}"
                )
            if index and not values[index - 1] < value:
                raise OptionError(
                    f"format {self.name}: values must be ascending, but value {index}, {value}, "
                    f"comes after {values[index - 1]}"
                )
        # One zero: -0.0 would otherwise make equal tables round to different bits.
        object.__setattr__(self, "values", tuple(value + 0.0 for value in values))

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return (len(self.values) - 1).bit_length()

    @property
    def _figures(self) -> Figures:
        least = min((value for value in self.values if value > 0), default=math.nan)
        bits = max(map(_significant_bits, self.values))
        epsilon = min(b - a for a, b in pairwise(self.values))
        return Figures(bits, epsilon, self.values[-1], least, least)

    @property
    def min(self) -> float:
        """The least value."""
        return self.values[0]

    @property
    def fits_in_float32(self) -> bool:
        return max(map(abs, self.values)) <= FLOAT32_MOST

    @property
    def is_exact_in_float32(self) -> bool:
        return self.fits_in_float32 and all(to_float32(each) == each for each in self.values)

    def params_in(self, binary: Binary, mode: str, overflow: Overflow) -> TableParams:
        values = self.values if binary.width == 64 else tuple(map(to_float32, self.values))
        return TableParams(binary, mode, values, _thresholds(values, binary, mode))

    def round(self, x: Tensor, noise: Tensor | None, p: TableParams) -> Tensor:
        values = self._constant("values", p, x)
        index = self._index(x, p)
        rounded = taken(values, index)
        if p.mode == "stochastic":
            assert noise is not None
            above = taken(values, CLAMP(ADD(index, 1), max=len(p.values) - 1))
            share = DIV(SUB(x, rounded), SUB(above, rounded))
            rounded = WHERE(GE(share, uniform(noise, p.binary)), above, rounded)
        return WHERE(NE(x, x), x, rounded)

    def _index(self, x: Tensor, p: TableParams) -> Tensor:
        """Returns the index of each rounded value; in stochastic mode, the lower neighbour's."""
        return BUCKETIZE(CONTIGUOUS(x), self._constant("thresholds", p, x))

    def _constant(self, name: str, p: TableParams, like: Tensor) -> Tensor:
        def make(device: torch.device) -> Tensor:
            return torch.tensor(getattr(p, name), dtype=p.binary.dtype, device=device)

        if torch.compiler.is_dynamo_compiling():
            return make(like.device)
        key = name, p.binary.width, p.mode, p.values is self.values  # else of float32
        known: Constant = self.derived.setdefault(key, Constant(make))
        return known.on(like.device)

    def kernel(self, p: TableParams) -> Kernel | None:
        """Returns None for float64, and if close values would make the index too large."""
        count, shift = len(p.values), 0
        entries: list[tuple[float, int]] = []
        if p.binary.width == 64:
            return None
        if count > SMALL_TABLE:
            thresholds = torch.tensor(p.thresholds, dtype=torch.float32)
            for shift in _SHIFTS:
                first, last = _first_and_last(shift, thresholds)
                if int((last - first).max()) <= 1:
                    break
            else:
                return None
            between = thresholds[first.clamp(max=count - 2)].masked_fill(first == last, math.inf)
            entries = list(zip(between.tolist(), first.tolist(), strict=True))
        memory = (
            array("f", [*p.values, p.values[-1]]),
            array("f", [*p.thresholds, math.inf]),
            array("B", b"".join([struct.pack("fi", *entry) for entry in entries])),
        )
        numbers = ROUNDING_MODES.index(p.mode), count, shift, zero_index(p.values)
        addresses = [each.buffer_info()[0] for each in memory]
        return Kernel("table", struct.pack("7q", *numbers, *addresses), memory=memory)

    def codes_of(self, rounded: Tensor, binary: Binary) -> Tensor:
        p = params_of(self, binary.dtype)
        return self._index(WHERE(NE(rounded, rounded), 0.0, rounded), p)

    def coding(self, binary: Binary) -> Coding:
        missing = [math.nan] * ((1 << self.bits) - len(self.values))
        values = array("f" if binary.width == 32 else "d", [*self.values, *missing])
        spec = struct.pack("2q", len(values) - 1, values.buffer_info()[0])
        return Coding("table", spec, memory=values)

    def values_of(self, codes: Tensor) -> Tensor:
        known = torch.tensor(self.values, dtype=torch.float64, device=codes.device)
        values = taken(known, CLAMP(codes, max=len(self.values) - 1))
        return values.masked_fill_(GE(codes, len(self.values)), math.nan)


def small_struct(p: TableParams) -> bytes:
    """Returns the values and the thresholds of a table of up to `SMALL_TABLE` values, both filled up to that."""
    spare = SMALL_TABLE - len(p.values)
    values = [*p.values, *p.values[-1:] * spare]
    return struct.pack(f"{2 * SMALL_TABLE}f", *values, *p.thresholds, *[math.inf] * (spare + 1))


def zero_index(values: tuple[float, ...]) -> int:
    """Returns the index of the value nearest to 0; of two the even one."""
    return min(range(len(values)), key=lambda index: (abs(values[index]), index % 2))


def _significant_bits(value: float) -> int:
    numerator = abs(value.as_integer_ratio()[0])
    return (numerator // (numerator & -numerator)).bit_length() if numerator else 0


def _thresholds(values: tuple[float, ...], binary: Binary, mode: str) -> tuple[float, ...]:
    """Returns, for adjacent values, the largest number that rounds to the lower one."""
    found = []
    for index, (low, high) in enumerate(pairwise(values)):
        # Neighbours on both sides of zero have no value between them and zero: there the nearest one is used.
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


def _first_and_last(shift: int, thresholds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the least and the largest index of numbers that differ only in the lower ``shift`` bits."""
    upper = torch.arange(1 << (32 - shift), dtype=torch.int64) << shift
    signed = torch.where(upper >= 2**31, upper - 2**32, upper)
    near = signed.to(torch.int32).view(torch.float32)
    far = (signed + ((1 << shift) - 1)).to(torch.int32).view(torch.float32)
    # Infinity shares its upper bits with NaNs, for which any index is fine.
    far = torch.where(torch.isnan(far), near, far)
    low, high = torch.minimum(near, far), torch.maximum(near, far)
    first, last = torch.bucketize(low, thresholds), torch.bucketize(high, thresholds)
    is_nan = torch.isnan(near)
    return first.masked_fill(is_nan, 0), last.masked_fill(is_nan, 0)
