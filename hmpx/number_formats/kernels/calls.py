"""Calls of the compiled kernels: the table of their arguments, and the kernel of each plan and coding.

Also functions of whole tensors without a format: extremes, and bfloat16 in one pass.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor

from ...tensors import is_in_memory
from .. import kernels
from ..layouts import NO_GRID, Grid

if TYPE_CHECKING:
    from ..plans import Coding, Plan

#: (source address, target address, elements, key, key, threads, grid, the tensor's given scale or None).
#: Encoders also take the width of a code in bytes, and the addresses of scales to write.
Kernel: TypeAlias = Callable[..., None]

#: (source address, elements, target address, threads): writes two numbers of float32, the smallest and
#: the largest of at least one element. One NaN makes both NaN.
Extremes: TypeAlias = Callable[[int, int, int, int], None]

#: Grids whose specs are kept for one plan.
_MOST_GRIDS: Final = 1024

#: The most threads whose results the C functions keep.
MOST_THREADS: Final = 64

#: Torch also runs smaller work on one thread.
THREADED: Final = 32768

_P, _N, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_KEY, _BF16 = ctypes.c_uint32, ctypes.c_uint16
_ROUND: Final = (_P, _P, _N, _P, _KEY, _KEY, _INT)
_ENCODE: Final = (*_ROUND, _P, _INT)

#: The arguments of the C functions.
_ARGUMENTS: Final[Mapping[str, tuple[Any, ...]]] = {
    "round": _ROUND,
    "encode": _ENCODE,
    "encode_block": (*_ENCODE, _P),
    "encode_scaled": (*_ENCODE, _P, _P),
    "decode": (_P, _P, _N, _P, _INT, _INT),
    "decode_scaled": (_P, _P, _P, _N, _P, _P, _INT, _INT, ctypes.c_float),
    "extremes": (_P, _N, _P, _INT),
    "bf16_rounded": (_P, _P, _N, _BF16, _INT),
    "bf16_mapped": (_P, _P, _N, _P, _INT),
    "bf16_scaled": (_P, _P, _P, _N, _P, _BF16, _INT),
    "bf16_rows_product": (_P, _P, _P, _N, _N, _N, _BF16, _INT),
}


def _function(library: ctypes.CDLL, name: str, kind: str) -> Any:
    function = getattr(library, name)
    function.restype, function.argtypes = None, _ARGUMENTS[kind]
    return function


def threads_for(count: int) -> int:
    """Returns the number of threads for this number of elements."""
    return 1 if count < THREADED else torch.get_num_threads()


# --- formats -----------------------------------------------------------------------------------


def _specs_of(make: Callable[[Grid], Any]) -> Callable[[Grid], Any]:
    """Returns a function that creates the spec for a grid once; a spec stays alive while its address is used."""
    by_grid: dict[Grid, Any] = {}

    def spec_of(grid: Grid) -> Any:
        spec = by_grid.get(grid)
        if spec is None:
            if len(by_grid) >= _MOST_GRIDS:
                by_grid.clear()
            spec = by_grid[grid] = make(grid)
        return spec

    return spec_of


def kernel(plan: Plan, coding: Coding | None = None) -> Kernel | None:
    """Returns the kernel that rounds by the plan, to codes if a coding is given; None if there is none."""
    library = kernels.library()
    if library is None or not plan.has_kernel:
        return None
    spec_of = _specs_of(plan.kernel_spec)
    only = None if plan.is_by_row else spec_of(NO_GRID)
    if only is None and not plan.is_by_row:
        return None
    name, kind = plan.symbol, "round"
    codes: tuple[int, ...] = ()
    if coding is not None:
        if not coding.can_encode:
            return None
        name, codes = f"encode_{name}", (ctypes.addressof(coding.spec),)
        kind = f"encode_{coding.kernel}" if plan.is_by_row else "encode"
    function = _function(library, name, kind)

    def run(  # noqa: PLR0917  # as the C function
        source: int,
        target: int,
        count: int,
        key0: int,
        key1: int,
        threads: int,
        grid: Grid,
        scale: float | None = None,
        *rest: int,
        _keep: Any = coding,
    ) -> None:
        spec = spec_of(grid) if only is None else only
        if scale is not None:  # for this call only
            spec = type(spec).from_buffer_copy(spec)
            spec.is_given, spec.given = True, scale
        address = ctypes.addressof(spec)
        function(source, target, count, address, key0, key1, threads, *codes, *rest)

    return run


def decoder(
    coding: Coding, width: int, make_spec: Callable[[Grid], Any] | None = None
) -> Callable[..., None] | None:
    """Returns the kernel that decodes to values of this number of bits; None if there is none.

    It takes (codes' address, values' address, elements, bytes of a code, threads), or, with a function for
    the specs of shared scales, (codes' address, scales' address, values' address, elements, grid,
    bytes of a code, threads, the tensor's scale or 1).
    """
    library = kernels.library()
    if library is None or not coding.can_decode:
        return None
    kind = "decode" if make_spec is None else "decode_scaled"
    function = _function(library, f"decode_{coding.kernel}_f{width}", kind)
    codes = ctypes.addressof(coding.spec)
    if make_spec is None:
        return lambda source, target, count, *rest, _keep=coding: function(
            source, target, count, codes, *rest
        )
    spec_of = _specs_of(make_spec)
    return lambda source, scales, target, count, grid, *rest, _keep=coding: function(
        source, scales, target, count, ctypes.addressof(spec_of(grid)), codes, *rest
    )


# --- extremes ----------------------------------------------------------------------------------

_EXTREMES: Final = {
    torch.float32: "extremes_f32",
    torch.bfloat16: "extremes_bf16",
    torch.float16: "extremes_f16",
}

_FLOAT32_MOST: Final = torch.finfo(torch.float32).max


@functools.cache
def extremes_kernels() -> Mapping[torch.dtype, Extremes]:
    """Returns a function for each dtype that finds its extremes; empty without compiled kernels."""
    library = kernels.library(is_essential=False)
    if library is None:
        return {}
    return {dtype: _function(library, name, "extremes") for dtype, name in _EXTREMES.items()}


def largest_magnitude(x: Tensor) -> float | None:
    """Returns the largest magnitude in a CPU tensor with its own memory; 0 for empty tensors.

    NaN if it contains infinity or NaN. None if there is no kernel for it.
    """
    extremes = extremes_kernels().get(x.dtype)
    is_turned = (
        x.dim() == 2 and x.stride(0) == 1 and x.stride(1) == x.shape[0]
    )  # a transposed matrix
    if extremes is None or not (x.is_contiguous() or is_turned) or not is_in_memory(x):
        return None
    count = x.numel()
    if not count:
        return 0.0
    found = (ctypes.c_float * 2)()
    threads = min(threads_for(count), MOST_THREADS)
    extremes(x.data_ptr(), count, ctypes.addressof(found), threads)
    amax = abs(max(-found[0], found[1]))
    return amax if amax <= _FLOAT32_MOST else math.nan


# --- bfloat16 ----------------------------------------------------------------------------------

# Read before anything is patched: op lists may name any of them.
_address, _numel = Tensor.data_ptr, Tensor.numel
_threads = torch.get_num_threads

#: The least elements per thread, as in torch.
_GRAIN: Final = 1 << 15


class Bfloat16Kernels:
    """Functions of dense tensors on the CPU; elementwise ones take tensors of one shape and layout."""

    __slots__ = ("_mapped", "_multiplied", "_nan", "_rounded", "_scaled")

    def __init__(self, library: ctypes.CDLL) -> None:
        names = ("bf16_rounded", "bf16_mapped", "bf16_scaled", "bf16_rows_product")
        self._rounded, self._mapped, self._scaled, self._multiplied = (
            _function(library, name, name) for name in names
        )
        with torch.inference_mode(False):
            nan = torch.full((1,), math.nan, dtype=torch.float32, device="cpu").bfloat16()
        self._nan = int(nan.view(torch.int16).item()) & 0xFFFF

    def round(self, source: Tensor, target: Tensor) -> Tensor:
        """Writes the values of ``source``, rounded to bfloat16, to ``target``; both are float32."""
        count = _numel(source)
        self._rounded(_address(source), _address(target), count, self._nan, _shares(count))
        return target

    def multiply(self, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        """Writes ``x @ weight.T``, with ``weight`` rounded to bfloat16; for few rows.

        float32, row by row: x [..., k], weight [n, k], target [..., n].
        """
        n, k = weight.shape
        self._multiplied(
            *(_address(x), _address(weight), _address(target)),
            *(_numel(x) // k, n, k, self._nan, _shares(n * k)),
        )
        return target

    def look_up(self, source: Tensor, target: Tensor, values: Tensor) -> Tensor:
        """Writes a function of ``source`` to ``target``, given its values at all 65,536 numbers; all bfloat16."""
        count = _numel(source)
        self._mapped(_address(source), _address(target), count, _address(values), _shares(count))
        return target

    def scale(self, source: Tensor, factors: Tensor, target: Tensor, values: Tensor) -> Tensor:
        """Writes ``factors``, times a function of ``source``, to ``target``, which may be one of these.

        All are bfloat16, except the function's values at all 65,536 numbers, which are float32.
        """
        count = _numel(source)
        self._scaled(
            *(_address(source), _address(factors), _address(target), count),
            *(_address(values), self._nan, _shares(count)),
        )
        return target


def _shares(count: int) -> int:
    """Returns the number of threads for this number of elements."""
    return 1 if count < 2 * _GRAIN else min(_threads(), count // _GRAIN)


@functools.cache
def bfloat16_kernels() -> Bfloat16Kernels | None:
    """Returns the kernels, or None."""
    library = kernels.library(is_essential=False)
    return None if library is None else Bfloat16Kernels(library)
