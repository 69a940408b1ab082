"""Tables: formats defined by their values."""

from __future__ import annotations

import ctypes
import math
from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor

from ... import arguments
from ...errors import OptionError, raised_here, shown
from ...tensors import Constant
from ..bits import FP32, FP64, Binary, to_float32, uniform
from ..plans import NO_GRID, Coding, Grid, Plan, struct
from ..unpatched import ADD, BUCKETIZE, CLAMP, CONTIGUOUS, DIV, GE, NE, SUB, WHERE, taken
from ..vocabulary import Overflow
from .number_format import FLOAT32_MOST, CodedFormat, Figures, check_name

_MOST_VALUES: Final = 65536

#: Tables of up to this number of values are searched one by one.
_SMALL_TABLE: Final = 16

#: Larger tables are indexed by upper bits: sign, exponent and 3 to 9 more.
_SHIFTS: Final = tuple(32 - upper for upper in range(12, 19))

#: The kernels' ``table_codes``, ``table_entry`` and ``table_spec``.
_TableCodes: Final = struct(("mask", ctypes.c_int64), ("values", ctypes.c_void_p))
_TableEntry: Final = struct(("threshold", ctypes.c_float), ("index", ctypes.c_int32))
_TableSpec: Final = struct(
    ("mode count shift nan_index", ctypes.c_int64),
    ("values thresholds", ctypes.POINTER(ctypes.c_float)),
    ("entries", ctypes.POINTER(_TableEntry)),
)


@dataclass(frozen=True)
class TablePlan(Plan):
    """Rounds to given values, by thresholds: the largest numbers that round to the lower neighbour."""

    values: tuple[float, ...]
    thresholds: tuple[float, ...]

    kernel = "table"
    kernel_binaries = (FP32,)

    def round(self, x: Tensor, noise: Tensor | None) -> Tensor:
        values = self._constant("values", x)
        index = self.index(x)
        rounded = taken(values, index)
        if self.mode == "stochastic":
            assert noise is not None
            above = taken(values, CLAMP(ADD(index, 1), max=len(self.values) - 1))
            share = DIV(SUB(x, rounded), SUB(above, rounded))
            rounded = WHERE(GE(share, uniform(noise, self.binary)), above, rounded)
        return WHERE(NE(x, x), x, rounded)

    def index(self, x: Tensor) -> Tensor:
        """Returns the index of each rounded value; in stochastic mode, the lower neighbour's."""
        return BUCKETIZE(CONTIGUOUS(x), self._constant("thresholds", x))

    def _constant(self, name: str, like: Tensor) -> Tensor:
        numbers, dtype = getattr(self, name), self.binary.dtype

        def make(device: torch.device) -> Tensor:
            return torch.tensor(numbers, dtype=dtype, device=device)

        if torch.compiler.is_dynamo_compiling():
            return make(like.device)
        known: Constant = vars(self).setdefault(f"_{name}", Constant(make))
        return known.on(like.device)

    @property
    def zero_index(self) -> int:
        """The index of the value nearest to 0."""
        return bisect_left(_thresholds(self.values, self.binary, "nearest"), 0.0)

    def kernel_spec(self, grid: Grid = NO_GRID) -> Any:
        """Returns the kernel's ``table_spec``: values, thresholds, and an index.

        None if close values would make the index too large.
        """
        count, shift = len(self.values), 0
        entries: list[tuple[float, int]] = []
        if count > _SMALL_TABLE:
            thresholds = torch.tensor(self.thresholds, dtype=torch.float32)
            for shift in _SHIFTS:
                first, last = _first_and_last(shift, thresholds)
                if int((last - first).max()) <= 1:
                    break
            else:
                return None
            between = thresholds[first.clamp(max=count - 2)].masked_fill(first == last, math.inf)
            entries = list(zip(between.tolist(), first.tolist(), strict=True))
        return _TableSpec(
            *(self.mode_number, count, shift, self.zero_index),
            (ctypes.c_float * (count + 1))(*self.values, self.values[-1]),
            (ctypes.c_float * count)(*self.thresholds, math.inf),
            (_TableEntry * len(entries))(*(_TableEntry(*entry) for entry in entries)),
        )


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

    def plan_in(self, binary: Binary, mode: str, overflow: Overflow) -> TablePlan:
        values = self.values if binary is FP64 else tuple(map(to_float32, self.values))
        return TablePlan(binary, mode, values, _thresholds(values, binary, mode))

    # --- codes ---------------------------------------------------------------------------------

    def codes_of(self, rounded: Tensor, binary: Binary) -> Tensor:
        nearest = self.plan(binary.dtype, "nearest", "saturate")
        assert isinstance(nearest, TablePlan)
        return nearest.index(WHERE(NE(rounded, rounded), 0.0, rounded))

    def coding(self, binary: Binary) -> Coding:
        count = 1 << self.bits
        kind = ctypes.c_float if binary is FP32 else ctypes.c_double
        values = (kind * count)(*self.values, *(math.nan,) * (count - len(self.values)))
        spec = _TableCodes(count - 1, ctypes.addressof(values))
        return Coding("table", spec, can_encode=binary is FP32, memory=values)

    def values_of(self, codes: Tensor) -> Tensor:
        known = torch.tensor(self.values, dtype=torch.float64, device=codes.device)
        values = taken(known, CLAMP(codes, max=len(self.values) - 1))
        return values.masked_fill_(GE(codes, len(self.values)), math.nan)


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
