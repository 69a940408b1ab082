"""The smallest and the largest value of memory on the CPU, several times faster than torch's ops."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import torch
from torch import Tensor

from ...tensors import is_in_memory
from . import library

#: (source address, elements, target address, threads): writes two numbers of float32, the smallest and
#: the largest of at least one element. One NaN makes both NaN.
Extremes: TypeAlias = Callable[[int, int, int, int], None]

#: Of how many threads the C functions keep a result.
MOST_THREADS: Final = 64

_FUNCTIONS: Final = {
    torch.float32: "extremes_f32",
    torch.bfloat16: "extremes_bf16",
    torch.float16: "extremes_f16",
}


@functools.cache
def extremes_kernels() -> Mapping[torch.dtype, Extremes]:
    """Returns a function for each dtype that finds its extremes; empty without compiled kernels.

    Raises:
        OptionError: ``HMPX_KERNELS`` has a value that it can't have, or names an unusable library.
    """
    compiled = library.library(is_essential=False)
    if compiled is None:
        return {}
    found = {dtype: getattr(compiled, name) for dtype, name in _FUNCTIONS.items()}
    for function in found.values():
        function.restype = None
        function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int)
    return found


#: Torch runs smaller work on one thread, too.
_THREADED: Final = 32768

_FLOAT32_MOST: Final = torch.finfo(torch.float32).max


def largest_magnitude(x: Tensor) -> float | None:
    """Returns the largest magnitude in a tensor on the CPU with memory of its own; 0 for nothing.

    Returns:
        NaN where it holds infinity or NaN. None where there is no kernel that can tell.

    Raises:
        OptionError: As for `extremes_kernels`.
    """
    kernel = extremes_kernels().get(x.dtype)
    if kernel is None or not (x.is_contiguous() or _is_turned(x)):
        return None
    if not is_in_memory(x):
        return None
    count = x.numel()
    if not count:
        return 0.0
    threads = 1 if count < _THREADED else min(torch.get_num_threads(), MOST_THREADS)
    found = (ctypes.c_float * 2)()
    kernel(x.data_ptr(), count, ctypes.addressof(found), threads)
    amax = abs(max(-found[0], found[1]))
    return amax if amax <= _FLOAT32_MOST else math.nan


def _is_turned(x: Tensor) -> bool:
    """Whether ``x`` is a contiguous matrix, transposed."""
    return x.dim() == 2 and x.stride(0) == 1 and x.stride(1) == x.shape[0]
