"""Rounding on the CPU at the speed of memory: calls of the functions in ``rounding_kernels.c``.

Plans say which function and which spec; `library` has the functions compiled.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from ..plans import Plan

#: (source address, target address, elements, key, key, threads, length of a row)
Kernel: TypeAlias = Callable[[int, int, int, int, int, int, int], None]

#: Lengths of rows whose specs are kept for one plan.
_MOST_LENGTHS: Final = 1024


def kernel(plan: Plan, library: ctypes.CDLL) -> Kernel | None:
    """Returns what rounds as the plan does, given addresses; None if no kernel does."""
    if not plan.has_kernel:
        return None
    function = getattr(library, plan.symbol)
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
    return _run_by_row(plan, function) if plan.is_by_row else _run_by_value(plan, function)


def _run_by_row(plan: Plan, function: Any) -> Kernel:
    by_length: dict[int, Any] = {}

    def run(  # noqa: PLR0917  # as the C function
        source: int, target: int, count: int, key0: int, key1: int, threads: int, length: int
    ) -> None:
        spec = by_length.get(length)
        if spec is None:
            if len(by_length) >= _MOST_LENGTHS:
                by_length.clear()
            spec = by_length[length] = plan.kernel_spec(length)
        function(source, target, count, ctypes.addressof(spec), key0, key1, threads)

    return run


def _run_by_value(plan: Plan, function: Any) -> Kernel | None:
    spec = plan.kernel_spec(0)
    if spec is None:
        return None
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
