"""The smallest and the largest value of each tensor, written to memory of its device without waiting.

A tensor has non-finite values exactly if one of the two is: NaN shows in both, an infinity in its own.
No sum tells that without false alarms, and none tells ranges. Everything is read together, in one copy
from each device. On the CPU compiled kernels find them, if there are any; elsewhere torch's ops.
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from collections.abc import Iterable, Mapping
from typing import Final

import torch
from torch import Tensor

from ..number_formats import MOST_THREADS, extremes_kernels
from ..patching import unpatched
from ..torch_internals import disable_modes, dispatch_modes

# As they are where nothing is patched: op lists may name any of them.
_amax, _amin, _aminmax, _as_strided = unpatched(
    torch.amax, torch.amin, torch.aminmax, torch.as_strided
)
_cat, _detach, _empty, _to = unpatched(torch.cat, Tensor.detach, torch.empty, Tensor.to)
_isfinite, _masked_select = unpatched(torch.isfinite, torch.masked_select)
_tolist, _unbind, _view_as_real = unpatched(Tensor.tolist, Tensor.unbind, torch.view_as_real)

#: Dtypes whose extremes are computed as they are, those of narrower ones after an upcast -> the bits
#: of an infinity, all of which NaN has, too.
_OWN_KERNELS: Final = {
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF0000000000000,
}

#: How many tensors a piece of memory has slots for, at first and at most.
_FEWEST, _MOST = 256, 16384

#: Up to so many elements a call costs more than what it computes.
_FEW: Final = 1 << 15

_CPU: Final = torch.device("cpu")

#: From so many elements on kernels run in several threads.
_MANY: Final = 1 << 17

#: The smallest and the largest value of a tensor.
Extremes = tuple[float, float]


class Slots:
    """Slots for the extremes of tensors, used by one thread at a time.

    Attributes:
        count: How many are in use.
        is_full: No memory is left: they must be read.
    """

    def __init__(self) -> None:
        """Starts without memory."""
        self._pieces: list[_Piece] = []
        self._open: dict[tuple[torch.device, torch.dtype], _Piece] = {}
        self._on_cpu: _Piece | None = None
        self._kernels = extremes_kernels()
        self._extremes = (ctypes.c_float * 2)()
        self._extremes_address = ctypes.addressof(self._extremes)
        self.count = 0

    @property
    def is_full(self) -> bool:
        """Whether the slots should be read before more are taken."""
        return self.count >= _MOST

    def measure(self, tensor: Tensor) -> int | None:
        """Writes the extremes of ``tensor`` into a slot and returns its number; None if it has none."""
        count = tensor.numel()
        if not count:
            return None
        kernel = self._kernels.get(tensor.dtype) if tensor.is_cpu else None
        if kernel is not None and not tensor.is_neg():
            is_row = tensor.is_contiguous() or _is_row(tensor.stride(), tensor.shape)
            if is_row and (address := tensor.data_ptr()):  # tensors of known zeros have no memory
                piece = self._on_cpu
                if piece is None or piece.used == piece.size:
                    piece = self._on_cpu = self._opened(_CPU, torch.float32)
                position = piece.used
                piece.used += 1
                self.count += 1
                kernel(address, count, piece.address + 8 * position, _threads_for(count))
                return piece.first_slot + position
        if dispatch_modes():  # of the program, which must not see this
            with disable_modes():
                return self._measure(tensor)
        return self._measure(tensor)

    def _measure(self, tensor: Tensor) -> int:
        if tensor.requires_grad:
            tensor = _detach(tensor)
        if tensor.dtype.is_complex:
            tensor = _view_as_real(tensor)
        if tensor.dtype not in _OWN_KERNELS:
            tensor = _to(tensor, torch.float32)
        slot, low, high = self._take(tensor.device, tensor.dtype)
        is_contiguous = tensor.is_contiguous()
        if not is_contiguous and _is_row(tensor.stride(), tensor.shape):
            tensor = _as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset())
            is_contiguous = True
        # On CPUs, M: 1M elements, us: of float32 200 and 200 against 320 together, of the low ones 350
        # and 350 against 210. Where elements are apart `aminmax` is far slower. Few elements of float32
        # take one call rather than two.
        is_split = tensor.dtype is torch.float32 and tensor.is_cpu and tensor.numel() > _FEW
        if is_contiguous and not is_split:
            _aminmax(tensor, out=(low, high))
        else:
            _amin(tensor, (), out=low)
            _amax(tensor, (), out=high)
        return slot

    def _take(self, device: torch.device, dtype: torch.dtype) -> tuple[int, Tensor, Tensor]:
        piece = self._opened(device, dtype)
        position = piece.used
        piece.used += 1
        self.count += 1
        low, high = piece.views[position]
        return piece.first_slot + position, low, high

    def _opened(self, device: torch.device, dtype: torch.dtype) -> _Piece:
        """Returns the memory of this kind that has slots left."""
        piece = self._open.get((device, dtype))
        if piece is None or piece.used == piece.size:
            size = _FEWEST if piece is None else min(4 * piece.size, _MOST)
            piece = self._open[device, dtype] = _Piece(size, device, dtype)
            piece.first_slot = len(self._pieces) * _MOST
            self._pieces.append(piece)
        return piece

    def is_finite(self, slot: int | None) -> bool:
        """Whether what a slot holds by now is finite; waits for its device, and runs no op on the CPU."""
        if slot is None:
            return True
        piece, position = self._pieces[slot // _MOST], slot % _MOST
        if not piece.memory.is_cpu:
            return all(map(math.isfinite, _tolist(piece.memory[position])))
        infinity, size = _OWN_KERNELS[piece.memory.dtype], piece.memory.element_size()
        low, high = (
            int.from_bytes(
                ctypes.string_at(piece.address + (2 * position + each) * size, size), sys.byteorder
            )
            for each in (0, 1)
        )
        return low & infinity != infinity and high & infinity != infinity

    def read(self) -> Mapping[int, Extremes] | None:
        """Returns what `read_all` does; None if all are finite, which is told without a look at each."""
        if self._is_all_finite_on_cpu():
            self._empty_all()
            return None
        values = self._read()
        # A sum of products with zero is not finite exactly if one of the values is not.
        if all(math.isfinite(sum([each * 0.0 for each in found])) for _, found in values):
            return None
        return _by_slot(values)

    def read_all(self) -> Mapping[int, Extremes]:
        """Returns slot -> the extremes in it, and empties all; waits for devices."""
        return _by_slot(self._read())

    def _read(self) -> list[tuple[list[int], list[float]]]:
        """Returns slots and the pairs of values in them, by one copy from each device."""
        on_devices: dict[torch.device, list[_Piece]] = {}
        for piece in self._pieces:
            if piece.used:
                on_devices.setdefault(piece.memory.device, []).append(piece)
        found = [_values_on(device, pieces) for device, pieces in on_devices.items()]
        self._empty_all()
        return found

    def _is_all_finite_on_cpu(self) -> bool:
        """Whether a kernel, of all that was written, tells that it is finite; False if none can tell."""
        kernel = self._kernels.get(torch.float32)
        used = [piece for piece in self._pieces if piece.used]
        if kernel is None or any(not piece.is_of_kernels for piece in used):
            return False
        for piece in used:
            kernel(piece.address, 2 * piece.used, self._extremes_address, 1)
            if not (math.isfinite(self._extremes[0]) and math.isfinite(self._extremes[1])):
                return False
        return True

    def _empty_all(self) -> None:
        self._kernels = extremes_kernels()  # they may have been built by now
        self.count, self._pieces = 0, list(self._open.values())
        for number, piece in enumerate(self._pieces):
            piece.used, piece.first_slot = 0, number * _MOST


class _Piece:
    """Memory for slots of one dtype on one device.

    Attributes:
        memory: [slots, 2].
        size: How many slots there are.
        address: Where that begins.
        views: Two tensors of no dimension for each slot.
        is_of_kernels: Kernels read it: on the CPU, of float32.
        first_slot: Number of the first slot.
        used: How many slots are in use.
    """

    def __init__(self, size: int, device: torch.device, dtype: torch.dtype) -> None:
        # Made where inference mode is off: other threads write to it.
        self.size = size
        with torch.inference_mode(False), torch.no_grad(), disable_modes():
            self.memory = _empty((size, 2), dtype=dtype, device=device)
            columns = [_unbind(column) for column in _unbind(self.memory, 1)]
        self.address = self.memory.data_ptr()
        self.is_of_kernels = device.type == "cpu" and dtype is torch.float32
        self.views = list(zip(*columns, strict=True))
        self.first_slot = self.used = 0


def _values_on(device: torch.device, pieces: list[_Piece]) -> tuple[list[int], list[float]]:
    """Returns the slots in use, and the pairs of values in them."""
    wide = torch.float32 if device.type == "mps" else torch.float64
    rows = [_to(piece.memory[: piece.used], wide) for piece in pieces]
    slots = [piece.first_slot + each for piece in pieces for each in range(piece.used)]
    return slots, _tolist(_cat(rows).flatten())


def _by_slot(values: Iterable[tuple[list[int], list[float]]]) -> dict[int, Extremes]:
    found: dict[int, Extremes] = {}
    for slots, pairs in values:
        found.update(zip(slots, zip(pairs[::2], pairs[1::2], strict=True), strict=True))
    return found


def _threads_for(count: int) -> int:
    return 1 if count < _MANY else min(torch.get_num_threads(), MOST_THREADS)


@functools.lru_cache(maxsize=1 << 10)
def _is_row(strides: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether elements lie in a row without gaps, each once, in whichever order."""
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
        return (0.0, 0.0) if slot is None else slots.read_all()[slot]


def exact_finite(tensor: Tensor | None, version: int) -> Extremes | None:
    """Returns the extremes of the finite values of a tensor that is as it was; None if there are none."""
    if tensor is None or tensor.is_inference() or tensor._version != version:
        return None
    with torch.no_grad(), disable_modes():
        kept = _detach(tensor)
        if kept.dtype.is_complex:
            kept = _view_as_real(kept)
        kept = _to(kept, torch.float64 if kept.dtype is torch.float64 else torch.float32)
        kept = _masked_select(kept, _isfinite(kept))
    return exact(kept) if kept.numel() else None
