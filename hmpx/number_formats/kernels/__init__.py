"""The compiled kernels of this process, from a library compiled when hmpx was installed, and their calls.

Without it, torch ops give the same results, bit for bit. ``HMPX_KERNELS`` overrides the choice: ``off``, or the
path of another installation's library. Some kernels work on whole tensors without a format: extremes, and
bfloat16 in one pass.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from ...errors import OptionError, printable, raised_here, suggestion
from ...tensors import is_in_memory
from .sources import digest

_LOGGER: Final = logging.getLogger("hmpx")
_FOLDER: Final = Path(__file__).parent
_ON: Final = ("", "on", "1", "yes", "true")
_OFF: Final = ("off", "0", "no", "false")

#: The processor's instructions, by torch's name -> the libraries that run on it, the fastest first.
_BY_CAPABILITY: Final = {"AVX512": ("avx512", "avx2"), "AVX2": ("avx2",)}


@dataclass(frozen=True)
class RoundingKernels:
    """The library with which this process rounds, or None; its path, and why there is none."""

    library: ctypes.CDLL | None = None
    path: Path | None = None
    fault: str = ""  # empty if ``HMPX_KERNELS`` is off


def library(*, is_essential: bool = True) -> ctypes.CDLL | None:
    """Returns the compiled kernels, or None; warns if there are none and they are essential.

    Raises `OptionError` if ``HMPX_KERNELS`` has an invalid value, or names an unusable library.
    """
    found = kernels_in_use()
    if is_essential and found.fault:
        _warn_once(found.fault)
    return found.library


@functools.cache
def kernels_in_use() -> RoundingKernels:
    """Returns the kernels of this process, which are chosen once. Raises as `library` does."""
    setting = os.environ.get("HMPX_KERNELS", "").strip()
    if setting.lower() in _OFF:
        return RoundingKernels()
    if setting.lower() in _ON:
        names = _BY_CAPABILITY.get(torch.backends.cpu.get_cpu_capability(), ("default",))
        paths = [path for name in names if (path := _FOLDER / f"rounding.{name}.so").exists()]
        if not paths:
            return RoundingKernels(
                fault="none for this processor were compiled when hmpx was installed"
            )
        return _loaded(paths[0])
    path = Path(setting)
    if not path.is_absolute():
        raise OptionError(
            f"HMPX_KERNELS={printable(setting)}: it can be on, off, or the absolute path of a library "
            "in another installation of hmpx" + suggestion(setting.lower(), ["on", "off"])
        )
    loaded = _loaded(path)
    if loaded.fault:
        raise OptionError(f"HMPX_KERNELS={printable(setting)} can't be used: {loaded.fault}")
    return loaded


def _loaded(path: Path) -> RoundingKernels:
    try:
        loaded = ctypes.CDLL(str(path))
        version = ctypes.c_char_p.in_dll(loaded, "source_digest").value
    except raised_here(OSError, ValueError) as error:  # ValueError: a missing symbol
        return RoundingKernels(fault=printable(str(error)))
    if version != digest().encode():
        fault = f"{path} was compiled from other sources than those of this version of hmpx"
        return RoundingKernels(fault=fault)
    return RoundingKernels(loaded, path)


@functools.cache
def _warn_once(fault: str) -> None:
    _LOGGER.warning(
        "torch ops round to number formats, several times slower than compiled kernels: %s; install a C "
        "compiler and then hmpx again (HMPX_KERNELS=off hides this)",
        fault,
    )


#: (source address, elements, target address, threads): writes two numbers of float32, the smallest and
#: the largest of at least one element. One NaN makes both NaN.
Extremes: TypeAlias = Callable[[int, int, int, int], None]

#: The most threads whose results the C functions keep.
MOST_THREADS: Final = 64

#: The least elements per thread, as in torch.
_GRAIN: Final = 32768

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
    "bf16_rows_product": (_P, _P, _P, _N, _N, _N, _BF16, _INT),
}


def function(name: str, kind: str, *, is_essential: bool = True) -> Any:
    """Returns the C function with the arguments of a kind, or None; raises as `library` does."""
    found = getattr(library(is_essential=is_essential), name, None)
    if found is not None:
        found.restype, found.argtypes = None, _ARGUMENTS[kind]
    return found


def threads_for(count: int) -> int:
    return 1 if count < 2 * _GRAIN else min(torch.get_num_threads(), count // _GRAIN)


# --- extremes ----------------------------------------------------------------------------------

_EXTREMES: Final = {
    torch.float32: "extremes_f32",
    torch.bfloat16: "extremes_bf16",
    torch.float16: "extremes_f16",
}


@functools.cache
def extremes_kernels() -> Mapping[torch.dtype, Extremes]:
    """Returns a function for each dtype that finds its extremes; empty without compiled kernels."""
    found = {
        dtype: function(name, "extremes", is_essential=False) for dtype, name in _EXTREMES.items()
    }
    return found if all(found.values()) else {}


def largest_magnitude(x: Tensor) -> float | None:
    """Returns the largest magnitude in a CPU tensor with its own memory; 0 for empty tensors.

    NaN if it contains infinity or NaN. None if there is no kernel for it.
    """
    extremes = extremes_kernels().get(x.dtype)
    # A transposed matrix
    is_turned = x.dim() == 2 and x.stride(0) == 1 and x.stride(1) == x.shape[0]
    if extremes is None or not (x.is_contiguous() or is_turned) or not is_in_memory(x):
        return None
    count = x.numel()
    if not count:
        return 0.0
    found = (ctypes.c_float * 2)()
    threads = min(threads_for(count), MOST_THREADS)
    extremes(x.data_ptr(), count, ctypes.addressof(found), threads)
    amax = abs(max(-found[0], found[1]))
    return amax if math.isfinite(amax) else math.nan


# --- bfloat16 ----------------------------------------------------------------------------------

# Read before anything is patched: op lists may name any of them.
_address, _numel = Tensor.data_ptr, Tensor.numel


class Bfloat16Kernels:
    """Functions of dense tensors on the CPU; elementwise ones take tensors of one shape and layout."""

    __slots__ = ("_multiplied", "_nan", "_rounded")

    def __init__(self) -> None:
        self._rounded = function("bf16_rounded", "bf16_rounded")
        self._multiplied = function("bf16_rows_product", "bf16_rows_product")
        with torch.inference_mode(False):
            nan = torch.full((1,), math.nan, dtype=torch.float32, device="cpu").bfloat16()
        self._nan = int(nan.view(torch.int16).item()) & 0xFFFF

    def round(self, source: Tensor, target: Tensor) -> Tensor:
        """Writes the values of ``source``, rounded to bfloat16, to ``target``; both are float32."""
        count = _numel(source)
        self._rounded(_address(source), _address(target), count, self._nan, threads_for(count))
        return target

    def multiply(self, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        """Writes ``x @ weight.T``, with ``weight`` rounded to bfloat16; for few rows.

        float32, row by row: x [..., k], weight [n, k], target [..., n].
        """
        n, k = weight.shape
        self._multiplied(
            *(_address(x), _address(weight), _address(target)),
            *(_numel(x) // k, n, k, self._nan, threads_for(n * k)),
        )
        return target


@functools.cache
def bfloat16_kernels() -> Bfloat16Kernels | None:
    """Returns the kernels, or None."""
    return None if library(is_essential=False) is None else Bfloat16Kernels()
