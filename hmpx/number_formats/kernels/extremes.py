"""The smallest and the largest value of memory on the CPU, several times faster than torch's ops."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import torch

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

_found: dict[torch.dtype, Extremes] = {}


def extremes_kernels() -> Mapping[torch.dtype, Extremes]:
    """Returns dtype -> what finds its extremes; empty while there are no compiled kernels.

    Raises:
        OptionError: ``HMPX_KERNELS`` has a value that it can't have, or names an unusable library.
    """
    if not _found and (compiled := library.library(is_essential=False)) is not None:
        for dtype, name in _FUNCTIONS.items():
            function = getattr(compiled, name)
            function.restype = None
            function.argtypes = (
                ctypes.c_void_p,
                ctypes.c_int64,
                ctypes.c_void_p,
                ctypes.c_int,
            )
            _found[dtype] = function
    return _found
