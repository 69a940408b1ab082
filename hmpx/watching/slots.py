"""The smallest and the largest value of each tensor, written to its device's memory without waiting.

A tensor has non-finite values exactly if one of the two is non-finite: NaN shows in both, an infinity in its
own. A sum would give false alarms and no ranges. All slots are read together, in one copy per device. On the
CPU compiled kernels compute them, if available; elsewhere torch's ops do.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from ..number_formats import MOST_THREADS, extremes_kernels
from ..patching import unpatched
from ..torch_internals import disable_modes, dispatch_modes

# The unpatched functions, since op lists may name any of them.
_amax, _amin, _aminmax, _as_strided = unpatched(
    torch.amax, torch.amin, torch.aminmax, torch.as_strided
)
_cat, _detach, _empty, _to = unpatched(torch.cat, Tensor.detach, torch.empty, Tensor.to)
_isfinite, _masked_select = unpatched(torch.isfinite, torch.masked_select)
_resolve_conj, _tolist, _unbind, _view_as_real = unpatched(
    torch.resolve_conj, Tensor.tolist, Tensor.unbind, torch.view_as_real
)

#: Dtypes whose extremes are computed without an upcast -> the bits of an infinity, all of which NaN also
#: has.
_OWN_KERNELS: Final = {
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF0000000000000,
}

#: Size in bytes -> the integer with as many bits.
_INTEGERS: Final[Mapping[int, Any]] = {2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}

#: Number of slots in a piece of memory, at first and at most.
_FEWEST, _MOST = 256, 16384

#: Kernels use several threads from this number of elements.
_MANY: Final = 1 << 17

#: The smallest and the largest value of a tensor.
Extremes = tuple[float, float]


class Slots:
    """Slots for the extremes of tensors, used by one thread at a time; ``count`` are in use."""

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []
        self._open: dict[tuple[torch.device, torch.dtype], _Piece] = {}
        self._kernels = extremes_kernels()
        self.count = 0

    @property
    def is_full(self) -> bool:
        """Whether the slots should be read before more are taken."""
        return self.count >= _MOST

    def measure(self, tensor: Tensor) -> int | None:
        """Writes the extremes of ``tensor`` into a slot and returns its number; None if it is empty."""
        count = tensor.numel()
        if not count:
            return None
        kernel = self._kernels.get(tensor.dtype) if tensor.is_cpu else None
        if kernel is not None and not tensor.is_neg():
            is_row = tensor.is_contiguous() or _is_row(tensor.stride(), tensor.shape)
            if is_row and (address := tensor.data_ptr()):  # tensors of known zeros have no memory
                piece, position = self._take(_CPU, torch.float32)
                threads = 1 if count < _MANY else min(torch.get_num_threads(), MOST_THREADS)
                kernel(address, count, piece.address + 8 * position, threads)
                return piece.first_slot + position
        if dispatch_modes():  # the program's modes, which must not see this
            with disable_modes():
                return self._measure(tensor)
        return self._measure(tensor)

    def _measure(self, tensor: Tensor) -> int:
        if tensor.requires_grad:
            tensor = _detach(tensor)
        if tensor.dtype.is_complex:
            tensor = _view_as_real(_resolve_conj(tensor))
        if tensor.dtype not in _OWN_KERNELS:
            tensor = _to(tensor, torch.float32)
        piece, position = self._take(tensor.device, tensor.dtype)
        low, high = piece.views[position]
        is_contiguous = tensor.is_contiguous()
        if not is_contiguous and _is_row(tensor.stride(), tensor.shape):
            tensor = _as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset())
            is_contiguous = True
        if is_contiguous:
            _aminmax(tensor, out=(low, high))
        else:  # `aminmax` is far slower on strided elements
            _amin(tensor, (), out=low)
            _amax(tensor, (), out=high)
        return piece.first_slot + position

    def _take(self, device: torch.device, dtype: torch.dtype) -> tuple[_Piece, int]:
        """Returns memory of this kind, and the position of a free slot in it."""
        piece = self._open.get((device, dtype))
        if piece is None or piece.used == piece.size:
            size = _FEWEST if piece is None else min(4 * piece.size, _MOST)
            piece = self._open[device, dtype] = _Piece(size, device, dtype)
            piece.first_slot = len(self._pieces) * _MOST
            self._pieces.append(piece)
        piece.used += 1
        self.count += 1
        return piece, piece.used - 1

    def is_finite(self, slot: int | None) -> bool:
        """Whether a slot's values are finite; waits for its device, but runs no op on the CPU."""
        if slot is None:
            return True
        piece, position = self._pieces[slot // _MOST], slot % _MOST
        if not piece.memory.is_cpu:
            return all(map(math.isfinite, _tolist(piece.memory[position])))
        bits, infinity = piece.bits, piece.infinity
        low, high = bits[2 * position], bits[2 * position + 1]
        return bool(low & infinity != infinity and high & infinity != infinity)

    def extremes(self, slot: int) -> Extremes:
        """Returns the extremes in a slot; waits for its device."""
        piece, position = self._pieces[slot // _MOST], slot % _MOST
        low, high = _tolist(piece.memory[position])
        return low, high

    def read(self, *, always: bool = False) -> Mapping[int, Extremes] | None:
        """Returns slot -> the extremes in it, and empties all; waits for devices.

        Unless ``always``, None if all of them are finite.
        """
        on_devices: dict[torch.device, list[_Piece]] = {}
        for piece in self._pieces:
            if piece.used:
                on_devices.setdefault(piece.memory.device, []).append(piece)
        slots: list[int] = []
        values: list[float] = []
        for device, pieces in on_devices.items():
            wide = torch.float32 if device.type == "mps" else torch.float64
            rows = [_to(piece.memory[: piece.used], wide) for piece in pieces]
            values += _tolist(_cat(rows).flatten())
            slots += [piece.first_slot + each for piece in pieces for each in range(piece.used)]
        self._kernels = extremes_kernels()  # they may have been built by now
        self.count, self._pieces = 0, list(self._open.values())
        for number, piece in enumerate(self._pieces):
            piece.used, piece.first_slot = 0, number * _MOST
        # A sum of products with zero is finite exactly if all values are.
        if not always and math.isfinite(sum([each * 0.0 for each in values])):
            return None
        pairs = zip(values[::2], values[1::2], strict=True)
        return dict(zip(slots, pairs, strict=True))


_CPU: Final = torch.device("cpu")


class _Piece:
    """Memory for slots of one dtype on one device: [slots, 2], of which the first ``used`` are in use."""

    def __init__(self, size: int, device: torch.device, dtype: torch.dtype) -> None:
        # Made where inference mode is off: other threads write to it.
        self.size = size
        with torch.inference_mode(False), torch.no_grad(), disable_modes():
            self.memory = _empty((size, 2), dtype=dtype, device=device)
            columns = [_unbind(column) for column in _unbind(self.memory, 1)]
        self.address = self.memory.data_ptr()
        self.infinity = _OWN_KERNELS[dtype]
        self.bits: Any = ()  # of the memory, read without an op
        if self.memory.is_cpu:
            kind = _INTEGERS[self.memory.element_size()]
            self.bits = (kind * (2 * size)).from_address(self.address)
        self.views = list(zip(*columns, strict=True))
        self.first_slot = self.used = 0


@functools.lru_cache(maxsize=1 << 10)
def _is_row(strides: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether the elements fill a row without gaps, each once, in any order."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def exact(tensor: Tensor) -> Extremes:
    """Returns the extremes of a tensor at once; waits for its device."""
    slots = Slots()
    with disable_modes():
        slot = slots.measure(tensor)
        found = slots.read(always=True)
    return (0.0, 0.0) if slot is None or found is None else found[slot]


def exact_finite(tensor: Tensor | None, version: int) -> Extremes | None:
    """Returns the extremes of the finite values of an unchanged tensor; None if there are none."""
    if tensor is None or tensor.is_inference() or tensor._version != version:
        return None
    with torch.no_grad(), disable_modes():
        kept = _detach(tensor)
        if kept.dtype.is_complex:
            kept = _view_as_real(_resolve_conj(kept))
        kept = _to(kept, torch.float64 if kept.dtype is torch.float64 else torch.float32)
        kept = _masked_select(kept, _isfinite(kept))
    return exact(kept) if kept.numel() else None
