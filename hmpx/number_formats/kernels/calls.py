"""Rounding on the CPU at the speed of memory: calls of the functions in ``rounding_kernels.c``.

Plans and codings say which function and which spec; `library` has the functions compiled.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from ..codings import Coding
from ..layouts import NO_GRID, Grid
from ..plans import Plan

#: (source address, target address, elements, key, key, threads, grid); a plan with scales takes that of the
#: whole tensor, too
Kernel: TypeAlias = Callable[..., None]

#: The same, and the width of a code in bytes; also the addresses of scales' codes, and of the tensor's scale.
Encoder: TypeAlias = Callable[..., None]

#: (source address, target address, elements, width of a code, threads)
Decoder: TypeAlias = Callable[..., None]

#: Grids whose specs are kept for one plan.
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
    elif coding.kernel == "scaled":
        types = (*types, ctypes.c_void_p, ctypes.c_void_p)
    function = _function(library, f"encode_{plan.symbol}", types)
    specs = _Specs(plan.kernel_spec)
    if not plan.is_by_row and specs.of(NO_GRID) is None:
        return None
    codes = ctypes.addressof(coding.spec)

    def run(  # noqa: PLR0917  # as the C function
        source: int,
        target: int,
        count: int,
        key0: int,
        key1: int,
        threads: int,
        grid: Grid,
        *rest: int,
        _keep: Any = coding,
    ) -> None:
        spec = specs.of(grid)
        function(source, target, count, ctypes.addressof(spec), key0, key1, threads, codes, *rest)

    return run


def decoder(coding: Coding | None, width: int, library: ctypes.CDLL) -> Decoder | None:
    """Returns what decodes to values of so many bits, given addresses; None if no kernel does.

    Not for those that share scales.
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


def scaled_decoder(
    spec_of: Callable[[Grid], Any], coding: Coding | None, library: ctypes.CDLL
) -> Decoder | None:
    """Returns what decodes elements that share scales; None if no kernel does.

    It takes (codes, scales, target, elements, grid, width of a code, threads, the tensor's scale or 1).

    Args:
        spec_of: Returns the ``scaled_spec`` for a grid.
        coding: Of the elements.
        library: The compiled kernels.
    """
    if coding is None or not coding.can_decode:
        return None
    types = (ctypes.c_void_p, *_DECODING[:4], ctypes.c_void_p, *_DECODING[4:], ctypes.c_float)
    function = _function(library, "decode_scaled_f32", types)
    specs, codes = _Specs(spec_of), ctypes.addressof(coding.spec)

    def run(  # noqa: PLR0917  # as the C function
        source: int,
        scales: int,
        target: int,
        count: int,
        grid: Grid,
        bytes_: int,
        threads: int,
        tensor_scale: float,
        _keep: Any = coding,
    ) -> None:
        spec = ctypes.addressof(specs.of(grid))
        function(source, scales, target, count, spec, codes, bytes_, threads, tensor_scale)

    return run


def _function(library: ctypes.CDLL, name: str, types: tuple[Any, ...]) -> Any:
    function = getattr(library, name)
    function.restype = None
    function.argtypes = types
    return function


class _Specs:
    """The specs of a plan that rounds by row, one for each grid."""

    __slots__ = ("_by_grid", "_spec_of")

    def __init__(self, spec_of: Callable[[Grid], Any]) -> None:
        self._spec_of = spec_of
        self._by_grid: dict[Grid, Any] = {}

    def of(self, grid: Grid) -> Any:
        """Returns the ctypes object for such a grid, which must be kept while its address is used."""
        spec = self._by_grid.get(grid)
        if spec is None:
            if len(self._by_grid) >= _MOST_LENGTHS:
                self._by_grid.clear()
            spec = self._by_grid[grid] = self._spec_of(grid)
        return spec


def _run_by_row(plan: Plan, function: Any) -> Kernel:
    specs = _Specs(plan.kernel_spec)

    def run(  # noqa: PLR0917  # as the C function
        source: int,
        target: int,
        count: int,
        key0: int,
        key1: int,
        threads: int,
        grid: Grid,
        scale: float | None = None,
    ) -> None:
        spec = specs.of(grid)
        if scale is not None:  # of this call only
            spec = type(spec).from_buffer_copy(spec)
            spec.is_given, spec.given = True, scale
        function(source, target, count, ctypes.addressof(spec), key0, key1, threads)

    return run


def _run_by_value(plan: Plan, function: Any) -> Kernel | None:
    spec = plan.kernel_spec()
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
        grid: Grid,
        _keep: Any = spec,
    ) -> None:
        function(source, target, count, address, key0, key1, threads)

    return run
