"""Low-precision weights whose fp32 values are kept beside them, as the kernels of fp32 read them.

For inference where the memory is there: legalized calls need not upcast such a weight. Independent of
which weights these are.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor

from ...tensors import LOW_DTYPES, PLAIN_TENSORS, SEQUENCES, Args, Kwargs, is_in_memory
from ..composition import widen

_address = Tensor.data_ptr  # taken before anything is patched: op lists may name it


class Prepared:
    """One weight, and what is kept beside it.

    Attributes:
        blocked: Settings of a convolution -> the values in the layout that it reads.
    """

    __slots__ = ("_state", "_values", "_weight", "blocked")

    def __init__(self, weight: Tensor, forget: Callable[[object], None]) -> None:
        self._weight = weakref.ref(weight, forget)
        self._state: tuple[int, int] | None = None
        self._values: Tensor | None = None
        self.blocked: dict[object, Tensor] = {}

    def is_of(self, weight: Tensor) -> bool:
        """Whether it is of this tensor, and up to date: what was kept of other values is forgotten."""
        if self._weight() is not weight or weight.dtype not in LOW_DTYPES:
            return False
        state = _address(weight), weight._version
        if state != self._state:  # written to, or moved
            self._values, self.blocked, self._state = None, {}, state
        return True

    def values(self) -> Tensor:
        """Returns the weight in fp32; keeps it."""
        found = self._values
        if found is None:
            found = self._values = self.made()
        return found

    def made(self) -> Tensor:
        """Returns the weight in fp32."""
        weight = self._weight()
        assert weight is not None
        with torch.inference_mode(False), torch.no_grad():
            return widen(weight)


#: The id of a weight -> what is kept of it.
_prepared: Final[dict[int, Prepared]] = {}


def prepare(weights: Iterable[Tensor]) -> Callable[[], None]:
    """Has legalized calls in inference keep the fp32 values of these low-precision weights.

    They are made when they are first needed, and freed with the weight. Writes that torch counts make
    them anew. Weights made in inference mode, whose writes it does not count, are left alone.

    Returns:
        A function that ends this, and frees them.
    """
    found = [weight for weight in weights if _can_be_prepared(weight)]
    for weight in found:
        key = id(weight)
        _prepared[key] = Prepared(weight, functools.partial(_forget, key))
    keys = [(id(weight), _prepared[id(weight)]) for weight in found]

    def end() -> None:
        for key, each in keys:
            if _prepared.get(key) is each:
                del _prepared[key]

    return end


def _can_be_prepared(weight: Tensor) -> bool:
    is_plain = type(weight) in PLAIN_TENSORS and not weight.is_meta and is_in_memory(weight)
    return is_plain and not weight.is_inference()


def _forget(key: int, reference: object) -> None:
    each = _prepared.get(key)
    if each is not None and each._weight is reference:
        del _prepared[key]


def is_any_prepared(args: Args, kwargs: Kwargs) -> bool:
    """Whether some argument is a weight whose values are kept."""
    if not _prepared:
        return False
    return any([_is_prepared(value) for value in (*args, *kwargs.values())])  # noqa: C419


def _is_prepared(value: Any) -> bool:
    if isinstance(value, SEQUENCES):
        return any([_is_prepared(item) for item in value])  # noqa: C419
    return isinstance(value, Tensor) and prepared(value) is not None


def prepared(weight: Tensor) -> Prepared | None:
    """Returns what is kept of a weight; None if nothing is."""
    found = _prepared.get(id(weight))
    return found if found is not None and found.is_of(weight) else None


def upcast(otherwise: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Returns the values kept of ``tensor``, or what ``otherwise`` returns for it."""
    found = prepared(tensor)
    return otherwise(tensor) if found is None else found.values()
