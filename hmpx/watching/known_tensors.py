"""Which tensors have been measured: by their memory and version, as views share these.

A weak reference keeps the address of freed memory from being given to other memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeGuard

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..tensors import PLAIN_TENSORS
from .records import Cell, version_of

storage_of: Final[Callable[[Tensor], Any]] = Tensor.untyped_storage

#: Of how many measurements of its parts a tensor may be known.
_MOST_PARTS: Final = 8


class KnownTensors:
    """What was measured of tensors that may still be alive."""

    def __init__(self) -> None:
        """Starts with none."""
        self._found: dict[int, tuple[StorageWeakRef, int, tuple[Cell, ...]]] = {}

    def find(self, tensor: Tensor, storage: Any) -> tuple[tuple[Cell, ...], bool] | None:
        """Returns what is known of ``tensor``, and whether that is of more than it; None if nothing is.

        Args:
            tensor: The tensor.
            storage: Its memory, as from `storage_of`.
        """
        found = self._found.get(storage._cdata)
        if found is None or found[1] != version_of(tensor) or found[1] < 0:
            return None
        return found[2], tensor.nbytes < storage.nbytes()

    def before(self, tensor: Tensor, storage: Any) -> tuple[Cell, ...] | None:
        """Returns what was known of ``tensor`` before a call wrote to it; None if nothing was."""
        found = self._found.get(storage._cdata)
        if found is None or not 0 <= version_of(tensor) - found[1] <= 1:
            return None
        return found[2]

    def note(self, tensor: Tensor, storage: Any, version: int, cell: Cell) -> None:
        """Notes that ``cell`` holds what ``tensor`` has now, at this version."""
        key = storage._cdata
        cells: tuple[Cell, ...] = (cell,)
        found = self._found.get(key)
        if version >= 0 and tensor.nbytes < storage.nbytes():
            # The rest is as it was, if that is known.
            if found is None or not 0 <= version - found[1] <= 1 or len(found[2]) >= _MOST_PARTS:
                self._found.pop(key, None)
                return
            cells = (*found[2], cell)
        reference = found[0] if found is not None else StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._found[key] = reference, version, cells

    def forget_dead(self) -> None:
        """Forgets memory that has been freed."""
        alive = [key for key, (storage, *_) in self._found.items() if not storage.expired()]  # type: ignore[no-untyped-call]
        self._found = {key: self._found[key] for key in alive}

    def forget(self) -> None:
        """Forgets all."""
        self._found = {}


def is_measurable(value: object) -> TypeGuard[Tensor]:
    """Whether ``value`` is a tensor whose values can be looked at."""
    if type(value) not in PLAIN_TENSORS:
        return False
    tensor: Any = value
    return tensor.dtype in _FLOATING and tensor.layout is torch.strided and not tensor.is_meta


_FLOATING: Final = frozenset(
    [
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)
    ]
)
