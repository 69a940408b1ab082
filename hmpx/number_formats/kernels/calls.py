"""Rounding on the CPU at the speed of memory: calls of the functions in ``rounding_kernels.c``.

Plans and codings say which function and which spec; `library` has the functions compiled.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from ..codings import Coding
from ..plans import Plan

#: Of plans that round by row: the length of a row, and the distance of neighbours in it.
Rows: TypeAlias = tuple[int, int]

#: (source address, target address, elements, key, key, threads, rows); a plan with scales takes that of the
#: whole tensor, too
Kernel: TypeAlias = Callable[..., None]

#: The same, and the width of a code in bytes; for blocks also the address of their scales' codes.
Encoder: TypeAlias = Callable[..., None]

#: (source address, target address, elements, width of a code, threads)
Decoder: TypeAlias = Callable[[int, int, int, int, int], None]

#: Lengths of rows whose specs are kept for one plan.
_MOST_LENGTHS: Final = 1024

_ROUNDING: Final = (
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_uint32,
    ctypes.c_uint32,
    ctypes.c_int,
)
_DECODING: Final = (
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_int,
)


def kernel(plan: Plan, library: ctypes.CDLL) -> Kernel | None:
    """Returns what rounds as the plan does, given addresses; None if no kernel does."""
    if not plan.has_kernel:
        return None
    function = _function(library, plan.symbol, _ROUNDING)
    return _run_by_row(plan, function) if plan.is_by_row else _run_by_value(plan, function)


def encoder(plan: Plan, coding: Coding | None, library: ctypes.CDLL) -> Encoder | None:
    """Returns what rounds to codes as the plan does, given addresses; None if no kernel does."""
    if coding is None or not (coding.can_encode and plan.has_kernel):
        return None
    types: tuple[Any, ...] = (*_ROUNDING, ctypes.c_void_p, ctypes.c_int)
    if coding.kernel == "block":
        types = (*types, ctypes.c_void_p)
    function = _function(library, f"encode_{plan.symbol}", types)
    specs = _Specs(plan)
    if not plan.is_by_row and specs.of((0, 1)) is None:
        return None
    codes = ctypes.addressof(coding.spec)

    def run(  # noqa: PLR0917  # as the C function
        source: int,
        target: int,
        count: int,
        key0: int,
        key1: int,
        threads: int,
        rows: Rows,
        *rest: int,
        _keep: Any = coding,
    ) -> None:
        spec = specs.of(rows)
        function(source, target, count, ctypes.addressof(spec), key0, key1, threads, codes, *rest)

    return run


def decoder(coding: Coding | None, width: int, library: ctypes.CDLL) -> Decoder | None:
    """Returns what decodes to values of so many bits, given addresses; None if no kernel does.

    Not for blocks.
    """
    if coding is None or not coding.can_decode:
        return None
    function = _function(library, f"decode_{coding.kernel}_f{width}", _DECODING)
    codes = ctypes.addressof(coding.spec)

    def run(
        source: int, target: int, count: int, bytes_: int, threads: int, _keep: Any = coding
    ) -> None:
        function(source, target, count, codes, bytes_, threads)

    return run


def block_decoder(plan: Plan, coding: Coding | None, library: ctypes.CDLL) -> Encoder | None:
    """Returns what decodes blocks: (codes, scales, target, elements, width, threads, rows)."""
    if coding is None or not coding.can_decode:
        return None
    types = (ctypes.c_void_p, *_DECODING[:4], ctypes.c_void_p, *_DECODING[4:])
    function = _function(library, "decode_block_f32", types)
    specs, codes = _Specs(plan), ctypes.addressof(coding.spec)

    def run(  # noqa: PLR0917  # as the C function
        source: int,
        scales: int,
        target: int,
        count: int,
        bytes_: int,
        threads: int,
        rows: Rows,
        _keep: Any = coding,
    ) -> None:
        spec = specs.of(rows)
        function(source, scales, target, count, ctypes.addressof(spec), codes, bytes_, threads)

    return run


def _function(library: ctypes.CDLL, name: str, types: tuple[Any, ...]) -> Any:
    function = getattr(library, name)
    function.restype = None
    function.argtypes = types
    return function


class _Specs:
    """The specs of a plan: one, or if it rounds by row one for each kind of rows."""

    __slots__ = ("_by_rows", "_plan")

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._by_rows: dict[Rows, Any] = {}

    def of(self, rows: Rows) -> Any:
        """Returns the ctypes object for such rows, which must be kept while its address is used."""
        rows = rows if self._plan.is_by_row else (0, 1)
        spec = self._by_rows.get(rows)
        if spec is None:
            if len(self._by_rows) >= _MOST_LENGTHS:
                self._by_rows.clear()
            spec = self._by_rows[rows] = self._plan.kernel_spec(*rows)
        return spec


def _run_by_row(plan: Plan, function: Any) -> Kernel:
    specs = _Specs(plan)

    def run(  # noqa: PLR0917  # as the C function
        source: int,
        target: int,
        count: int,
        key0: int,
        key1: int,
        threads: int,
        rows: Rows,
        scale: float | None = None,
    ) -> None:
        spec = specs.of(rows)
        if scale is not None:  # of this call only
            spec = type(spec).from_buffer_copy(spec)
            spec.is_given, spec.given = True, scale
        function(source, target, count, ctypes.addressof(spec), key0, key1, threads)

    return run


def _run_by_value(plan: Plan, function: Any) -> Kernel | None:
    spec = plan.kernel_spec(0, 1)
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
        rows: Rows,
        _keep: Any = spec,
    ) -> None:
        function(source, target, count, address, key0, key1, threads)

    return run
