"""Memory for the fp32 tensors that live within one call; each thread keeps it for its next call.

Fresh memory from the system costs more than the work done in it: on the CPU the first touch of a page
takes as long as casting a thousand values, and large blocks go back to the system when they are freed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from ...number_formats import bfloat16_kernels
from ...tensors import CAST, is_in_memory
from ..composition import widen

if TYPE_CHECKING:
    from ...number_formats import Bfloat16Kernels

# Taken before anything is patched: op lists may name any of them.
_as_strided, _copy_, _view = Tensor.as_strided, Tensor.copy_, Tensor.view
_empty, _empty_strided, _mm = torch.empty, torch.empty_strided, torch.mm

_MOST: Final = 1 << 26  # elements that a thread keeps: 256 MiB
_LINE: Final = 16  # elements in a cache line

_thread: Final = threading.local()  # .memory; None while a call uses it


class Temporaries:
    """The fp32 tensors of one call; none may be used after `free`.

    A nested call finds no kept memory, and tensors that do not fit get fresh memory, so no two tensors
    in use ever share any.
    """

    __slots__ = ("_device", "_memory", "_used")

    def __init__(self, device: torch.device) -> None:
        self._device, self._used = device, 0
        self._memory: Tensor | None = None
        if device.type == "cpu":  # elsewhere torch keeps memory itself
            self._memory = getattr(_thread, "memory", None)
            _thread.memory = None

    def free(self) -> None:
        """Gives the memory back to the thread, enlarged if this call could have used more."""
        if self._device.type != "cpu":
            return
        size = min(self._used, _MOST)
        if self._memory is None or self._memory.numel() < size:
            with torch.inference_mode(False):
                self._memory = _empty(size, dtype=torch.float32, device=self._device)
        _thread.memory = self._memory

    def empty(self, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
        """Returns a new tensor; ``strides`` must be those of a dense tensor."""
        size = 1
        for length in shape:
            size *= length
        start = self._take(size)
        if not self._fits():
            return _empty_strided(shape, strides, dtype=torch.float32, device=self._device)
        assert self._memory is not None
        return _as_strided(self._memory, shape, strides, start)

    def widen(self, tensor: Tensor) -> Tensor:
        """Returns a copy of ``tensor``."""
        return _copy_(self.empty(tensor.shape, _dense_strides(tensor)), tensor)

    def raised(self, tensor: Tensor) -> Tensor:
        """Returns ``tensor``, or a copy if it is not fp32."""
        return tensor if tensor.dtype is torch.float32 else self.widen(tensor)

    def mm(self, a: Tensor, b: Tensor) -> Tensor:
        """Returns the product of two fp32 matrices."""
        n = b.shape[1]
        return _mm(a, b, out=self.empty((a.shape[0], n), (n, 1)))

    def rounded(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns a copy of ``tensor`` with values of the low-precision ``dtype``."""
        return self._round(tensor, self.empty(tensor.shape, _dense_strides(tensor)), dtype)

    def round_(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Rounds a dense fp32 tensor to values of the low-precision ``dtype``."""
        return self._round(tensor, tensor, dtype)

    def _round(self, tensor: Tensor, output: Tensor, dtype: torch.dtype) -> Tensor:
        if round_in_one_pass(tensor, output, dtype):
            return output
        dense = _dense_strides(tensor)
        start = self._take((tensor.numel() + 1) // 2)
        if self._fits():
            assert self._memory is not None
            memory = _view(self._memory, dtype)
            low = _copy_(_as_strided(memory, tensor.shape, dense, 2 * start), tensor)
        else:
            low = CAST[dtype](tensor)
        return _copy_(output, low)

    def _take(self, size: int) -> int:
        start = self._used
        self._used = start + (size + _LINE - 1) // _LINE * _LINE
        return start

    def _fits(self) -> bool:
        return self._memory is not None and self._used <= self._memory.numel()


class New:
    """Does what `Temporaries` does, in new tensors, which others may see: autograd above all."""

    widen = staticmethod(widen)
    mm = staticmethod(_mm)

    @staticmethod
    def raised(tensor: Tensor) -> Tensor:
        """Returns ``tensor``, or a copy if it is not fp32."""
        return tensor if tensor.dtype is torch.float32 else widen(tensor)

    @staticmethod
    def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns a copy of ``tensor`` with values of the low-precision ``dtype``."""
        return widen(CAST[dtype](tensor))

    round_ = rounded

    def free(self) -> None:
        """There is nothing to give back."""


def round_in_one_pass(source: Tensor, target: Tensor, dtype: torch.dtype) -> bool:
    """Writes ``source``, rounded to ``dtype``, to the fp32 ``target``, if there is a kernel for that.

    Returns:
        Whether there is.
    """
    if not source.stride() == target.stride() == _dense_strides(source):
        return False
    kernels = _kernels_for(source, dtype)
    if kernels is None:
        return False
    kernels.round(source, target)
    return True


def multiplied_in_one_pass(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Returns ``x @ weight.T``, with values of the weight rounded to ``dtype``; None if there is no kernel for that.

    Args:
        x: fp32: [..., k]; a few rows. As the weight, it is contiguous.
        weight: fp32: [n, k].
        dtype: The low-precision dtype.
    """
    kernels = _kernels_for(weight, dtype)
    if kernels is None:
        return None
    shape = (*x.shape[:-1], weight.shape[0])
    return kernels.multiply(x, weight, _empty(shape, dtype=torch.float32, device=weight.device))


def has_kernels(source: Tensor, dtype: torch.dtype) -> bool:
    """Whether kernels round values of ``source`` to ``dtype``."""
    return _kernels_for(source, dtype) is not None


def _kernels_for(source: Tensor, dtype: torch.dtype) -> Bfloat16Kernels | None:
    """Returns the kernels that may read ``source`` and round it to ``dtype``."""
    if source.dtype is not torch.float32 or dtype is not torch.bfloat16 or not source.is_cpu:
        return None
    return bfloat16_kernels() if is_in_memory(source) else None


def _dense_strides(tensor: Tensor) -> Sequence[int]:
    """Returns the strides for a copy of ``tensor``: its own if its values lie without gaps."""
    strides = tensor.stride()
    if tensor.is_contiguous():
        return strides
    expected = 1
    for stride, length in sorted(zip(strides, tensor.shape, strict=True)):
        if length != 1 and stride != expected:
            break
        expected *= length
    else:
        return strides
    contiguous = [1]
    for length in reversed(tensor.shape[1:]):
        contiguous.append(contiguous[-1] * length)
    return contiguous[::-1]
