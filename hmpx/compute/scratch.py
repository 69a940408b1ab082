"""Reused memory for the fp32 tensors of one call, and rounding of weights into it.

Each thread keeps the memory for its next call: on the CPU the first touch of a page takes as long as casting a
thousand values, and freed large blocks return to the system.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from ..number_formats import bfloat16_kernels
from ..tensors import CAST, Args, Kwargs, is_in_memory
from ..torch_internals import dispatch_modes, has_tangents, is_batch, transforms
from .composition import call_raised, rounded, widen, widen_matrices

if TYPE_CHECKING:
    from ..number_formats import Bfloat16Kernels

# Read before anything is patched: op lists may name any of them.
_as_strided, _copy_, _view = Tensor.as_strided, Tensor.copy_, Tensor.view
_empty, _empty_like, _empty_strided = torch.empty, torch.empty_like, torch.empty_strided

_MOST: Final = 1 << 26  # elements that a thread keeps: 256 MiB
_LINE: Final = 16  # elements in a cache line

_thread: Final = threading.local()  # .memory; None while a call uses it


class New:
    """New fp32 tensors, which others, such as autograd, may see."""

    __slots__ = ()

    widen = staticmethod(widen)

    def rounded(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns a copy of ``tensor`` with values of the low-precision ``dtype``."""
        return widen(CAST[dtype](tensor))

    def round_(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns an fp32 tensor, which may be written to, with values of the low-precision ``dtype``."""
        return self.rounded(tensor, dtype)

    def free(self) -> None:
        """Does nothing: no memory is reused."""


class Temporaries(New):
    """The fp32 tensors of one call, in reused memory; none may be used after `free`.

    Nested calls, and tensors that do not fit, get fresh memory, so tensors in use never share memory.
    """

    __slots__ = ("_device", "_memory", "_used")

    def __init__(self, device: torch.device) -> None:
        self._device, self._used = device, 0
        self._memory: Tensor | None = None
        if device.type == "cpu":  # elsewhere torch reuses memory itself
            self._memory = getattr(_thread, "memory", None)
            _thread.memory = None

    def free(self) -> None:
        """Returns the memory to the thread, enlarged if this call needed more."""
        if self._device.type != "cpu":
            return
        size = min(self._used, _MOST)
        if self._memory is None or self._memory.numel() < size:
            with torch.inference_mode(False):
                self._memory = _empty(size, dtype=torch.float32, device=self._device)
        _thread.memory = self._memory

    def empty(self, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
        """Returns a new tensor; ``strides`` must be those of a dense tensor."""
        start = self._take(math.prod(shape))
        if start is None or self._memory is None:
            return _empty_strided(shape, strides, dtype=torch.float32, device=self._device)
        return _as_strided(self._memory, shape, strides, start)

    def widen(self, tensor: Tensor) -> Tensor:
        """Returns a copy of ``tensor``."""
        return _copy_(self.empty(tensor.shape, _dense_strides(tensor)), tensor)

    def rounded(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns a copy of ``tensor`` with values of the low-precision ``dtype``."""
        return self._round(tensor, self.empty(tensor.shape, _dense_strides(tensor)), dtype)

    def round_(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Rounds a dense fp32 tensor in place."""
        return self._round(tensor, tensor, dtype)

    def _round(self, tensor: Tensor, output: Tensor, dtype: torch.dtype) -> Tensor:
        if round_in_one_pass(tensor, output, dtype):
            return output
        dense = _dense_strides(tensor)
        start = self._take((tensor.numel() + 1) // 2)
        if start is not None and self._memory is not None:
            memory = _view(self._memory, dtype)
            low = _copy_(_as_strided(memory, tensor.shape, dense, 2 * start), tensor)
        else:
            low = CAST[dtype](tensor)
        return _copy_(output, low)

    def _take(self, size: int) -> int | None:
        """Returns the start of memory for this number of elements; None if it does not fit."""
        start, memory = self._used, self._memory
        self._used = start + (size + _LINE - 1) // _LINE * _LINE
        return start if memory is not None and self._used <= memory.numel() else None


def is_seen() -> bool:
    """Whether a mode may keep tensors, or a transform wraps them."""
    return bool(dispatch_modes()) or transforms() is not None


def memory_for(gradient: Tensor) -> New:
    """Returns the memory for a backward: new tensors if others may see them."""
    if torch.is_grad_enabled() or is_batch(gradient) or is_seen():
        return New()
    return Temporaries(gradient.device)


def in_reused_memory(
    function: Callable[..., Any], args: Args, kwargs: Kwargs, dtype: torch.dtype
) -> Any:
    """Returns a product without recording gradients, with upcast inputs in reused memory; the result is new."""
    if is_seen() or has_tangents():
        return rounded(call_raised(function, args, kwargs, widen_matrices), CAST[dtype])
    memory = Temporaries(torch.device("cpu"))

    def raised(tensor: Tensor) -> Tensor:
        is_plain = tensor.dim() < 3 or tensor.is_contiguous()
        return memory.widen(tensor) if is_plain and tensor.is_cpu else widen_matrices(tensor)

    result = call_raised(function, args, kwargs, raised)
    memory.free()
    return rounded(result, CAST[dtype])


@dataclass(frozen=True, slots=True)
class Rounding:
    """How the inputs and gradients of a product with a weight are rounded."""

    dtype: torch.dtype  # the low-precision dtype
    rounds_inputs: bool  # fp32 inputs are rounded first

    def raised(self, tensor: Tensor, memory: New) -> Tensor:
        """Returns the fp32 tensor to compute with."""
        if tensor.dtype is not torch.float32:
            return memory.widen(tensor)
        return memory.rounded(tensor, self.dtype) if self.rounds_inputs else tensor

    def gradient(self, gradient: Tensor, dtype: torch.dtype, memory: New) -> Tensor:
        """Returns the outgoing gradient of an input of ``dtype``; may write to the fp32 one."""
        if dtype is not torch.float32:
            return CAST[dtype](gradient)
        return memory.round_(gradient, self.dtype) if self.rounds_inputs else gradient


def round_in_one_pass(source: Tensor, target: Tensor, dtype: torch.dtype) -> bool:
    """Writes ``source``, rounded to ``dtype``, to the fp32 ``target``; returns False without a kernel."""
    if not source.stride() == target.stride() == _dense_strides(source):
        return False
    kernels = kernels_for(source, dtype)
    if kernels is None:
        return False
    kernels.round(source, target)
    return True


def kernels_for(source: Tensor, dtype: torch.dtype) -> Bfloat16Kernels | None:
    """Returns the kernels that may read ``source`` and round it to ``dtype``."""
    if source.dtype is not torch.float32 or dtype is not torch.bfloat16 or not source.is_cpu:
        return None
    return bfloat16_kernels() if is_in_memory(source) else None


def _dense_strides(tensor: Tensor) -> Sequence[int]:
    """Returns the strides for a copy of ``tensor``: its own if it has no gaps."""
    if tensor.is_contiguous():
        return tensor.stride()
    return _empty_like(tensor, device="meta").stride()
