"""The smallest and the largest value of each tensor, written to memory of its device without waiting.

A tensor has non-finite values exactly if one of the two is: NaN shows in both, an infinity in its own.
No sum tells that without false alarms, and none tells ranges. Everything is read together, in one copy
from each device.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

from ..torch_internals import disable_modes, dispatch_modes

# Taken before anything is patched: op lists may name any of them.
_amax, _amin, _aminmax, _as_strided = torch.amax, torch.amin, torch.aminmax, torch.as_strided
_cat, _detach, _empty, _to = torch.cat, Tensor.detach, torch.empty, Tensor.to
_isfinite, _masked_select = torch.isfinite, torch.masked_select
_tolist, _unbind, _view_as_real = Tensor.tolist, Tensor.unbind, torch.view_as_real

#: Dtypes whose extremes are computed as they are; those of narrower ones after an upcast.
_OWN_KERNELS: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})

#: How many tensors a piece of memory has slots for, at first and at most.
_FEWEST, _MOST = 256, 16384

#: The smallest and the largest value of a tensor.
Extremes = tuple[float, float]


class Slots:
    """Slots for the extremes of tensors.

    Attributes:
        count: How many are in use.
        homes: The piece of memory that each slot is in, and where.
        is_full: No memory is left: they must be read.
    """

    def __init__(self) -> None:
        """Starts without memory."""
        self._lock = threading.Lock()
        self._pieces: dict[tuple[torch.device, torch.dtype], _Piece] = {}
        self.count = 0
        self.homes: list[tuple[_Piece, int]] = []

    @property
    def is_full(self) -> bool:
        """Whether the slots should be read before more are taken."""
        return self.count >= _MOST

    def measure(self, tensor: Tensor) -> int | None:
        """Writes the extremes of ``tensor`` into a slot and returns its number; None if it has none."""
        if not tensor.numel():
            return None
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
        if not is_contiguous:
            tensor = _in_order_of_memory(tensor)
            is_contiguous = tensor.is_contiguous()
        # On CPUs, M: 1M elements, us: of float32 200 and 200 against 320 together, of the low ones 350
        # and 350 against 210. Where elements are apart `aminmax` is far slower.
        if is_contiguous and not (tensor.is_cpu and tensor.dtype is torch.float32):
            _aminmax(tensor, out=(low, high))
        else:
            _amin(tensor, (), out=low)
            _amax(tensor, (), out=high)
        return slot

    def _take(self, device: torch.device, dtype: torch.dtype) -> tuple[int, Tensor, Tensor]:
        with self._lock:
            piece = self._pieces.get((device, dtype))
            if piece is None or piece.used == len(piece.views):
                size = _FEWEST if piece is None else min(4 * len(piece.views), _MOST)
                piece = self._pieces[device, dtype] = _Piece(size, device, dtype)
            slot = self.count
            self.count += 1
            self.homes.append((piece, piece.used))
            low, high = piece.views[piece.used]
            piece.used += 1
            return slot, low, high

    def read(self) -> list[Extremes] | None:
        """Returns the extremes in all slots, in their order, and empties these; waits for devices.

        None if all are finite.
        """
        with self._lock:
            homes, self.homes, self.count = self.homes, [], 0
            pieces = {id(piece): piece for piece, _ in homes}
            values = _values(pieces.values())
            for piece in self._pieces.values():
                piece.used = 0
        if values is None:
            return None
        return [values[id(piece)][position] for piece, position in homes]


class _Piece:
    """Memory for slots of one dtype on one device.

    Attributes:
        memory: [slots, 2].
        views: Two tensors of no dimension for each slot.
        used: How many slots are in use.
    """

    def __init__(self, size: int, device: torch.device, dtype: torch.dtype) -> None:
        # Made where inference mode is off: other threads write to it.
        with torch.inference_mode(False), torch.no_grad():
            self.memory = _empty((size, 2), dtype=dtype, device=device)
            columns = [_unbind(column) for column in _unbind(self.memory, 1)]
        self.views = list(zip(*columns, strict=True))
        self.used = 0


def _values(pieces: Iterable[_Piece]) -> dict[int, list[Extremes]] | None:
    """Returns id of a piece -> the extremes in it, by one copy from each device; None if all are finite."""
    on_devices: dict[torch.device, list[_Piece]] = {}
    for piece in pieces:
        on_devices.setdefault(piece.memory.device, []).append(piece)
    found: dict[int, list[Extremes]] = {}
    is_finite = True
    for device, theirs in on_devices.items():
        wide = torch.float32 if device.type == "mps" else torch.float64
        rows = [_to(piece.memory[: piece.used], wide) for piece in theirs]
        # A sum of products with zero is not finite exactly if one of the values is not.
        values = _tolist(_cat(rows).flatten())
        is_finite = is_finite and math.isfinite(sum([each * 0.0 for each in values]))
        pairs = list(zip(values[::2], values[1::2], strict=True))
        for piece in theirs:
            found[id(piece)], pairs = pairs[: piece.used], pairs[piece.used :]
    return None if is_finite else found


def _in_order_of_memory(tensor: Tensor) -> Tensor:
    """Returns a contiguous view with the elements of ``tensor`` in another order, if there is one."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return tensor
            expected *= size
    return _as_strided(tensor, (expected,), (1,), tensor.storage_offset())


def exact(tensor: Tensor) -> Extremes:
    """Returns the extremes of a tensor at once; waits for its device."""
    slots = Slots()
    slot = slots.measure(tensor)
    if slot is None:
        return 0.0, 0.0
    piece, _ = slots.homes[slot]
    low, high = _tolist(_to(piece.memory[0], torch.float64))
    return low, high


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
