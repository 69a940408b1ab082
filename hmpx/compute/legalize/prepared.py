"""Low-precision weights of convolutions whose fp32 values are kept beside them, as kernels read them.

For inference where the memory is there: legalized calls need not upcast such a weight. Independent of
which weights these are, and of how a convolution is computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn

from ...tensors import LOW_DTYPES, PLAIN_TENSORS, is_in_memory
from ..composition import widen

# Taken before anything is patched: op lists may name any of them.
_address, _numel = Tensor.data_ptr, Tensor.numel

#: Elements of a weight; below this, upcasting costs less than the bookkeeping here.
_LEAST: Final = 1 << 15


class Prepared:
    """What is kept beside one weight. Its memory lives as long, so that no other tensor gets the address."""

    __slots__ = ("_kept", "_layout", "_storage", "_version")

    def __init__(self, weight: Tensor) -> None:
        self._storage = weight.untyped_storage()
        self._layout, self._version = _layout(weight), weight._version
        self._kept: dict[Hashable, Tensor] = {}

    def is_of(self, weight: Tensor) -> bool:
        """Whether ``weight``, which lies there, is read in the same layout; forgets old values."""
        if _layout(weight) != self._layout:
            return False
        version = weight._version
        if version != self._version:
            self._kept, self._version = {}, version
        return True

    def kept(self, key: Hashable, make: Callable[[Tensor], Tensor], weight: Tensor) -> Tensor:
        """Returns what ``make`` has made of the weight in fp32; keeps it under ``key``."""
        kept = self._kept
        found = kept.get(key)
        if found is None:
            with torch.inference_mode(False), torch.no_grad():
                found = kept[key] = make(widen(weight))
        return found


def _layout(weight: Tensor) -> tuple[Any, ...]:
    return weight.dtype, weight.shape, weight.stride(), is_in_memory(weight)


#: The address of a weight -> what is kept of it.
_prepared: Final[dict[int, Prepared]] = {}


def prepare(weights: Iterable[Tensor], owner: nn.Module) -> Callable[[], None]:
    """Has legalized convolutions in inference keep the fp32 values of these low-precision weights.

    They are made when they are first needed, anew after a write that torch counts, and freed with the
    module that owns the weights. A weight that gets other memory is upcast in each call again.

    Returns:
        A function that ends this, and frees them.
    """
    mine = {_address(weight): Prepared(weight) for weight in weights if _may_be_prepared(weight)}
    _prepared.update(mine)
    finalizer = weakref.finalize(owner, _forget, mine)
    finalizer.atexit = False
    return finalizer  # once only


def _forget(mine: dict[int, Prepared]) -> None:
    for address, each in mine.items():
        if _prepared.get(address) is each:
            del _prepared[address]


def _may_be_prepared(weight: Tensor) -> bool:
    if type(weight) not in PLAIN_TENSORS or not weight.is_cpu or weight.dtype not in LOW_DTYPES:
        return False
    is_known = weight.dim() > 2 and _numel(weight) >= _LEAST and is_in_memory(weight)
    return is_known and not weight.is_inference()  # those don't count writes


def is_any_prepared() -> bool:
    """Whether values of some weight are kept, or will be."""
    return bool(_prepared)


def prepared(weight: Any) -> Prepared | None:
    """Returns what is kept of a weight; None if nothing is."""
    if type(weight) not in PLAIN_TENSORS or not weight.is_cpu:
        return None
    found = _prepared.get(_address(weight))
    return found if found is not None and found.is_of(weight) else None
