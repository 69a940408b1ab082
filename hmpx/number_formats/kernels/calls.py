"""Rounding on the CPU at the speed of memory: calls of the functions in ``rounding_kernels.c``.

Turns plans into the specs that those functions take; `kernel_library` has them compiled.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch

from ..rounding import (
    FP32,
    ROUNDING_MODES,
    BitsPlan,
    BlockPlan,
    FixedPlan,
    FloatPlan,
    Plan,
    PositPlan,
    TablePlan,
)

#: (source address, target address, elements, key, key, threads, length of a row)
Kernel: TypeAlias = Callable[[int, int, int, int, int, int, int], None]


#: Up to so many values of a table are compared one by one.
_SMALL_TABLE: Final = 16

#: By so many upper bits the values of a larger one are found: sign, exponent and 3 to 9 more.
_SHIFTS: Final = tuple(32 - upper for upper in range(12, 19))

#: Lengths of rows whose specs a plan of blocks keeps.
_MOST_LENGTHS: Final = 1024


def kernel(plan: Plan, library: ctypes.CDLL) -> Kernel | None:
    """Returns what rounds as the plan does, given addresses; None if no kernel does."""
    kind, make_spec = _spec(plan)
    if kind is None:
        return None
    function = getattr(library, f"{kind}_{'f32' if plan.binary is FP32 else 'f64'}")
    function.restype = None
    function.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_uint32,
        ctypes.c_int,
    ]
    if isinstance(plan, BlockPlan):
        by_length: dict[int, Any] = {}

        def run_blocks(  # noqa: PLR0917  # as the C function
            source: int, target: int, count: int, key0: int, key1: int, threads: int, length: int
        ) -> None:
            spec = by_length.get(length)
            if spec is None:
                if len(by_length) >= _MOST_LENGTHS:
                    by_length.clear()
                spec = by_length[length] = make_spec(length)
            function(source, target, count, ctypes.addressof(spec), key0, key1, threads)

        return run_blocks

    spec = make_spec(0)
    address = ctypes.addressof(spec)

    def run(  # noqa: PLR0917  # as the C function
        source: int,
        target: int,
        count: int,
        key0: int,
        key1: int,
        threads: int,
        length: int,
        _keep: Any = spec,
    ) -> None:
        function(source, target, count, address, key0, key1, threads)

    return run


def _spec(plan: Plan) -> tuple[str | None, Callable[[int], Any]]:
    """Returns a kernel's name, and what makes its spec for a length of rows."""
    mode = ROUNDING_MODES.index(plan.mode)
    if isinstance(plan, FloatPlan):
        numbers = _float_spec(plan)
        return "float", lambda length: (ctypes.c_int64 * 8)(*numbers)
    if isinstance(plan, BitsPlan):
        numbers = [
            mode,
            plan.unit,
            plan.lowest_unit,
            plan.max,
            plan.beyond,
            plan.has_negative_zero,
        ]
        return "bits", lambda length: (ctypes.c_int64 * 6)(*numbers)
    if isinstance(plan, PositPlan):
        numbers = [mode, plan.bits, plan.es, plan.least, plan.most, plan.parity, plan.last]
        return "posit", lambda length: (ctypes.c_int64 * 7)(*numbers)
    if isinstance(plan, FixedPlan):
        most = (1 << (plan.bits - 1)) - 1
        scale = 1 << plan.fraction
        return "fixed", lambda length: _FixedSpec(mode, scale, 1 / scale, -most - 1, most)
    if isinstance(plan, BlockPlan):
        numbers = [*_float_spec(plan.element), plan.element.max_exponent, plan.size]
        return "block", lambda length: (ctypes.c_int64 * 11)(*numbers, length)
    if isinstance(plan, TablePlan) and plan.binary is FP32 and plan.mode != "stochastic":
        spec = _table_spec(plan)
        if spec is not None:
            return "table", lambda length: spec
    return None, lambda length: None


def _float_spec(plan: FloatPlan) -> list[int]:
    return [
        ROUNDING_MODES.index(plan.mode),
        plan.lowest,
        plan.highest,
        plan.lift,
        plan.lowest_power,
        plan.binary.bits_of(plan.max),
        plan.binary.bits_of(plan.beyond),
        plan.has_negative_zero,
    ]


class _FixedSpec(ctypes.Structure):
    _fields_ = (
        ("mode", ctypes.c_int64),
        ("scale", ctypes.c_double),
        ("step", ctypes.c_double),
        ("least", ctypes.c_double),
        ("most", ctypes.c_double),
    )


class _TableSpec(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int64),
        ("shift", ctypes.c_int64),
        ("values", ctypes.POINTER(ctypes.c_float)),
        ("thresholds", ctypes.POINTER(ctypes.c_float)),
        ("entries", ctypes.POINTER(ctypes.c_float)),
    )


def _table_spec(plan: TablePlan) -> _TableSpec | None:
    """Returns values and thresholds, and where to look, by the upper bits of a number.

    None if values are so near each other that this would take too much memory.
    """
    count = len(plan.values)
    thresholds = torch.tensor(plan.thresholds, dtype=torch.float32)
    if count <= _SMALL_TABLE:
        entries: list[float] = []
        shift = 0
    else:
        for shift in _SHIFTS:
            first, last = _first_and_last(shift, thresholds)
            if int((last - first).max()) <= 1:
                break
        else:
            return None
        values = torch.tensor(plan.values, dtype=torch.float32)
        # A threshold between the two values; or any, between a value and itself.
        between = thresholds[first.clamp(max=count - 2)]
        entries = torch.stack((between, values[first], values[last]), 1).flatten().tolist()
    return _TableSpec(
        count,
        shift,
        (ctypes.c_float * count)(*plan.values),
        (ctypes.c_float * count)(*plan.thresholds, float("inf")),
        (ctypes.c_float * len(entries))(*entries),
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
