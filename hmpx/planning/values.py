"""Values of whole numbers and bools beside fake tensors, which have none: positions, masks, token ids.

Programs ask whether a mask is all ones, or positions start anew, and go another way if so. What follows from
such tensors alone is computed for real; what is computed from floating-point ones has no values.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch
from torch import Tensor

from ..torch_internals import disable_modes, storage_of

_WHOLE: Final = frozenset({torch.bool, torch.uint8, torch.int32, torch.int64})

#: Larger tensors have no values: they would take time and memory.
_MOST: Final = 1 << 20


class Unknown(Exception):  # noqa: N818  # nobody's mistake
    """A tensor has no values."""


class Values:
    """Follows values through calls."""

    def __init__(self) -> None:
        """Knows of none."""
        self._known: dict[Any, tuple[Any, Tensor]] = {}

    def of(self, tensor: Tensor) -> Tensor | None:
        """Returns a real tensor with the values of a fake one; None if they aren't known."""
        memory, values = self._known.get(_place(tensor), (None, None))
        return values if memory is not None and memory() is not None else None

    def keep(self, tensor: Tensor, values: Tensor) -> None:
        """Notes the values of a tensor that is made from a real one."""
        if values.dtype in _WHOLE and values.numel() <= _MOST and not values.is_meta:
            self._note(tensor, values.detach().cpu().clone())

    def _note(self, tensor: Tensor, values: Tensor) -> None:
        place = _place(tensor)
        memory = weakref.ref(storage_of(tensor), lambda _: self._known.pop(place, None))
        self._known[place] = memory, values

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Computes a call's values, if its result and all that it takes may have any."""
        if not isinstance(result, Tensor) or result.dtype not in _WHOLE or result.numel() > _MOST:
            return
        try:
            real_args = self._real(args)
            real_kwargs = {name: self._real(each) for name, each in kwargs.items()}
            if "device" in real_kwargs:
                real_kwargs["device"] = torch.device("cpu")
            with disable_modes(), torch.no_grad():
                values = func(*real_args, **real_kwargs)
        except (Unknown, RuntimeError, NotImplementedError, TypeError, ValueError):
            self._known.pop(_place(result), None)
            return
        if isinstance(values, Tensor) and values.shape == result.shape:
            self._note(result, values)

    def _real(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            found = self.of(value)
            if found is None:
                raise Unknown
            return found
        if isinstance(value, (list, tuple)):
            return type(value)([self._real(each) for each in value])
        return value


def _place(tensor: Tensor) -> Any:
    """Returns what identifies a view of some memory: autograd makes new tensors of the same view."""
    return (
        storage_of(tensor)._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(),
        tensor.dtype,
    )  # fmt: skip
