"""Tables: formats that are given by their values."""

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
from ...errors import OptionError, shown
from ...tensors import Constant
from ..bits import FP32, FP64, Binary, to_float32
from ..codings import Coding, TableCodes
from ..layouts import NO_GRID, Grid
from ..modes import Overflow
from ..noise import uniform
from ..plans import Plan
from ..unpatched import ADD, BUCKETIZE, CLAMP, CONTIGUOUS, DIV, GE, NE, SUB, WHERE, taken
from .number_format import CodedFormat, check_name

_MOST_VALUES: Final = 65536

#: Up to so many values of a table are compared one by one.
_SMALL_TABLE: Final = 16

#: By so many upper bits the values of a larger one are found: sign, exponent and 3 to 9 more.
_SHIFTS: Final = tuple(32 - upper for upper in range(12, 19))


@dataclass(frozen=True)
class TablePlan(Plan):
    """Formats given by their values.

    Attributes:
        binary: The type that it computes in.
        mode: The rounding mode.
        values: As they are in that type.
        thresholds: Between neighbours: the largest number that is rounded to the lower.
    """

    binary: Binary
    mode: str
    values: tuple[float, ...]
    thresholds: tuple[float, ...]

    kernel = "table"
    kernel_binaries = (FP32,)

    def round(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """Returns the values of ``x`` rounded."""
        values = self._constant("values", self.values, x)
        index = self.index(x)
        rounded = taken(values, index)
        if self.mode == "stochastic":
            assert noise is not None
            above = taken(values, CLAMP(ADD(index, 1), max=len(self.values) - 1))
            share = DIV(SUB(x, rounded), SUB(above, rounded))
            rounded = WHERE(GE(share, uniform(noise, self.binary)), above, rounded)
        return WHERE(NE(x, x), x, rounded)

    def index(self, x: Tensor) -> Tensor:
        """Returns the index of each rounded value; the lower one if the mode is stochastic."""
        return BUCKETIZE(CONTIGUOUS(x), self._constant("thresholds", self.thresholds, x))

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

    @property
    def zero_index(self) -> int:
        """The index of the value nearest to 0."""
        return bisect_left(_thresholds(self.values, self.binary, "nearest"), 0.0)

    def kernel_spec(self, grid: Grid = NO_GRID) -> Any:
        """Returns the kernel's ``table_spec``; None if it would take too much memory."""
        return _table_spec(self)


@dataclass(frozen=True)
class Table(CodedFormat):
    """A format that is given by its values; a code is a value's index.

    Attributes:
        name: An identifier.
        values: Ascending, finite, distinct; any sequence of numbers, kept as a tuple.

    Example:
        >>> ternary = hmpx.formats.Table("ternary", (-1.0, 0.0, 1.0))
        >>> hmpx.formats.quantize(torch.tensor([-0.7, 0.2, 3.0]), ternary)
        tensor([-1.,  0.,  1.])
    """

    name: str
    values: tuple[float, ...]

    plans = (TablePlan,)

    def __post_init__(self) -> None:
        """Checks the values, and makes them a tuple.

        Raises:
            OptionError: The values are not numbers, not finite, not ascending, or too few or many.
        """
        check_name(self.name)
        what = f"format {self.name}: values"
        given = arguments.items(what, self.values, "a sequence of numbers")
        try:
            values = tuple([float(value) for value in given])
        except Exception:  # raised by whatever calls itself a number
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
    def significand_bits(self) -> int:
        """Most bits of a significand among the values."""
        return max(_significant_bits(value) for value in self.values)

    @property
    def epsilon(self) -> float:
        """The least distance between neighbours."""
        return min(b - a for a, b in pairwise(self.values))

    @property
    def max(self) -> float:
        """The largest value."""
        return self.values[-1]

    @property
    def min(self) -> float:
        """The least value."""
        return self.values[0]

    @property
    def smallest_normal(self) -> float:
        """The smallest positive value, NaN if there is none."""
        return min((value for value in self.values if value > 0), default=math.nan)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive value, NaN if there is none."""
        return self.smallest_normal

    # --- rounding ------------------------------------------------------------------------------

    @property
    def fits_in_float32(self) -> bool:
        """Whether float32 has room for all values, and for what rounding adds to them."""
        return max(map(abs, self.values)) <= torch.finfo(torch.float32).max

    @property
    def is_exact_in_float32(self) -> bool:
        """Whether every value is one of float32."""
        limit = torch.finfo(torch.float32).max
        return all(abs(value) <= limit and to_float32(value) == value for value in self.values)

    def plan_in(self, binary: Binary, mode: str, overflow: Overflow) -> Plan:
        """Returns how to round tensors of a binary type that the format fits in."""
        values = self.values if binary is FP64 else tuple(map(to_float32, self.values))
        return TablePlan(binary, mode, values, _thresholds(values, binary, mode))

    # --- codes ---------------------------------------------------------------------------------

    def codes_of(self, rounded: Tensor, binary: Binary) -> Tensor:
        """Returns the codes of values of the format, which are their indices."""
        nearest = self.plan(binary.dtype, "nearest", "saturate")
        assert isinstance(nearest, TablePlan)
        return nearest.index(WHERE(NE(rounded, rounded), 0.0, rounded))

    def coding(self, binary: Binary) -> Coding | None:
        """Returns what kernels are told to make or read the codes of values of a binary type."""
        count = 1 << self.bits
        kind = ctypes.c_float if binary is FP32 else ctypes.c_double
        values = (kind * count)(*self.values, *(math.nan,) * (count - len(self.values)))
        spec = TableCodes(count - 1, ctypes.addressof(values))
        return Coding("table", spec, can_encode=binary is FP32, memory=values)

    def coded_plan(self, dtype: torch.dtype, mode: str, overflow: Overflow | None) -> Plan | None:
        """Returns the plan in the type of ``dtype`` by which a kernel finds codes, if there is one."""
        if mode == "stochastic":
            return None
        if dtype is not torch.float32 or not self.fits_in_float32 or self.is_exact_in_float32:
            return super().coded_plan(dtype, mode, overflow)
        # Which float32 are above a threshold is known by the largest one that is not.
        floors = tuple(FP32.floor(Fraction(each)) for each in _thresholds(self.values, FP64, mode))
        plan = TablePlan(FP32, mode, tuple(map(to_float32, self.values)), floors)
        zero_index = bisect_left(_thresholds(self.values, FP64, "nearest"), 0.0)
        return plan if plan.zero_index == zero_index else None

    def values_of(self, codes: Tensor) -> Tensor:
        """Returns the values of int64 codes, in float64."""
        known = torch.tensor(self.values, dtype=torch.float64, device=codes.device)
        values = taken(known, CLAMP(codes, max=len(self.values) - 1))
        return values.masked_fill_(GE(codes, len(self.values)), math.nan)


def _significant_bits(value: float) -> int:
    numerator = abs(value.as_integer_ratio()[0])
    return (numerator // (numerator & -numerator)).bit_length() if numerator else 0


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


class _TableEntry(ctypes.Structure):
    """The kernel's ``table_entry``."""

    _fields_ = (("threshold", ctypes.c_float), ("index", ctypes.c_int32))


class _TableSpec(ctypes.Structure):
    """The kernel's ``table_spec``."""

    _fields_ = (
        ("mode", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("shift", ctypes.c_int64),
        ("nan_index", ctypes.c_int64),
        ("values", ctypes.POINTER(ctypes.c_float)),
        ("thresholds", ctypes.POINTER(ctypes.c_float)),
        ("entries", ctypes.POINTER(_TableEntry)),
    )


def _table_spec(plan: TablePlan) -> _TableSpec | None:
    """Returns values and thresholds, and where to look, by the upper bits of a number.

    None if values are so near each other that this would take too much memory.
    """
    count = len(plan.values)
    thresholds = torch.tensor(plan.thresholds, dtype=torch.float32)
    entries: list[tuple[float, int]] = []
    shift = 0
    if count > _SMALL_TABLE:
        for shift in _SHIFTS:
            first, last = _first_and_last(shift, thresholds)
            if int((last - first).max()) <= 1:
                break
        else:
            return None
        between = thresholds[first.clamp(max=count - 2)].masked_fill(first == last, math.inf)
        entries = list(zip(between.tolist(), first.tolist(), strict=True))
    return _TableSpec(
        plan.mode_number,
        count,
        shift,
        plan.zero_index,
        (ctypes.c_float * (count + 1))(*plan.values, plan.values[-1]),
        (ctypes.c_float * count)(*plan.thresholds, math.inf),
        (_TableEntry * len(entries))(*(_TableEntry(*entry) for entry in entries)),
    )


def _first_and_last(shift: int, thresholds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the least and the largest index that numbers with the same upper bits have.

    Args:
        shift: How many lower bits may differ.
        thresholds: float32, ascending.
    """
    upper = torch.arange(1 << (32 - shift), dtype=torch.int64) << shift
    signed = torch.where(upper >= 2**31, upper - 2**32, upper)
    near = signed.to(torch.int32).view(torch.float32)
    far = (signed + ((1 << shift) - 1)).to(torch.int32).view(torch.float32)
    # Infinity shares its upper bits with NaNs, for which any index will do.
    far = torch.where(torch.isnan(far), near, far)
    low, high = torch.minimum(near, far), torch.maximum(near, far)
    first, last = torch.bucketize(low, thresholds), torch.bucketize(high, thresholds)
    is_nan = torch.isnan(near)
    return first.masked_fill(is_nan, 0), last.masked_fill(is_nan, 0)
