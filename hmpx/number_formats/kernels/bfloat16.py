"""What compiled kernels do with bfloat16 on the CPU: rounding in one pass or on the way, and functions looked up."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Final

import torch
from torch import Tensor

from . import library

# Taken before anything is patched: op lists may name any of them.
_address, _numel = Tensor.data_ptr, Tensor.numel
_threads = torch.get_num_threads

_POINTER, _COUNT, _THREADS = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_BITS: Final = ctypes.c_uint16

#: Elements for each thread, at least; torch gives its own as many.
_GRAIN: Final = 1 << 15


class Bfloat16Kernels:
    """Functions of dense tensors on the CPU; elementwise ones take tensors of one shape and layout."""

    __slots__ = ("_mapped", "_multiplied", "_nan", "_rounded", "_scaled")

    def __init__(self, compiled: ctypes.CDLL) -> None:
        self._rounded = _function(compiled, "bf16_rounded", _POINTER, _POINTER, _COUNT, _BITS)
        self._mapped = _function(compiled, "bf16_mapped", _POINTER, _POINTER, _COUNT, _POINTER)
        self._scaled = _function(
            compiled, "bf16_scaled", _POINTER, _POINTER, _POINTER, _COUNT, _POINTER, _BITS
        )
        self._multiplied = _function(
            compiled, "bf16_rows_product", *(_POINTER,) * 3, *(_COUNT,) * 3, _BITS
        )
        with torch.inference_mode(False):
            nan = torch.full((1,), float("nan"), dtype=torch.float32, device="cpu").bfloat16()
        self._nan = int(nan.view(torch.int16).item()) & 0xFFFF

    def round(self, source: Tensor, target: Tensor) -> Tensor:
        """Writes the values of ``source``, rounded to bfloat16, to ``target``; both are float32."""
        count = _numel(source)
        self._rounded(_address(source), _address(target), count, self._nan, _shares(count))
        return target

    def multiply(self, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        """Writes ``x @ weight.T``, with values of ``weight`` rounded to bfloat16; for few rows.

        Args:
            x: float32: [..., k], row by row.
            weight: float32: [n, k], row by row.
            target: float32: [..., n], row by row.
        """
        n, k = weight.shape
        self._multiplied(
            *(_address(x), _address(weight), _address(target)),
            *(_numel(x) // k, n, k, self._nan, _shares(n * k)),
        )
        return target

    def look_up(self, source: Tensor, target: Tensor, values: Tensor) -> Tensor:
        """Writes a function of ``source`` to ``target``; all are bfloat16.

        Args:
            source: The arguments.
            target: What is written to.
            values: The function's values at the 65,536 numbers, in the order of their bits.
        """
        count = _numel(source)
        self._mapped(_address(source), _address(target), count, _address(values), _shares(count))
        return target

    def scale(self, source: Tensor, factors: Tensor, target: Tensor, values: Tensor) -> Tensor:
        """Writes ``factors``, times a function of ``source``, to ``target``; all are bfloat16.

        Args:
            source: The arguments.
            factors: What is multiplied.
            target: What is written to; may be one of the others.
            values: float32: the function's values at the 65,536 numbers, in the order of their bits.
        """
        count = _numel(source)
        self._scaled(
            *(_address(source), _address(factors), _address(target), count),
            *(_address(values), self._nan, _shares(count)),
        )
        return target


def _function(compiled: ctypes.CDLL, name: str, *types: Any) -> Any:
    function = getattr(compiled, name)
    function.restype = None
    function.argtypes = (*types, _THREADS)
    return function


def _shares(count: int) -> int:
    """Returns how many threads are worth it."""
    return 1 if count < 2 * _GRAIN else min(_threads(), count // _GRAIN)


@functools.cache
def bfloat16_kernels() -> Bfloat16Kernels | None:
    """Returns the kernels; None if there are none.

    Raises:
        OptionError: ``HMPX_KERNELS`` has a value that it can't have, or names an unusable library.
    """
    compiled = library.library(is_essential=False)
    return None if compiled is None else Bfloat16Kernels(compiled)
