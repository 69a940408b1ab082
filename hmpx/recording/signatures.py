"""The signature of a call: its arguments, with shapes and dtypes in place of tensors; hashable.

It holds no tensors. Calls with equal signatures cost the same.
"""

from __future__ import annotations

import enum
import math
import numbers
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ..tensors import Args, Kwargs
from ..torch_internals import behind_transform, is_of_transform

Signature = tuple["Items", tuple[tuple[str, Any], ...]]


class Shape(NamedTuple):
    """Replaces a tensor; ``times`` is the number that `torch.func.vmap` computes in one call."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    learns: bool
    times: int = 1

    @property
    def bytes(self) -> int:
        """The bytes of its elements."""
        return math.prod(self.sizes) * self.dtype.itemsize * self.times


class Real:
    """Replaces a float. All are equal, since neither shapes nor costs depend on their values."""

    __slots__ = ("value",)

    def __init__(self, value: float) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is Real

    def __hash__(self) -> int:
        return hash(Real)


class Items(NamedTuple):
    """Replaces a list or tuple."""

    values: tuple[Any, ...]
    is_list: bool


def signature(args: Args, kwargs: Mapping[str, Any], *, learns: bool) -> Signature | None:
    """Returns the signature of a call; None if an argument is neither a tensor nor a plain value.

    Functions and other objects of the program may hold tensors, and are not kept.
    """
    found = (
        Items(tuple([_standing_for(value, learns) for value in args]), is_list=False),
        tuple([(name, _standing_for(value, learns)) for name, value in sorted(kwargs.items())]),
    )
    try:
        hash(found)
    except TypeError:  # an object of the program's, a slice before Python 3.12, symbolic sizes
        return None
    return found


def shapes(value: Any, *, learns: bool = False) -> tuple[Shape, ...]:
    """Returns the shapes of all tensors in ``value``, which may be nested in lists and tuples."""
    return tuple(_shapes(_standing_for(value, learns)))


def shapes_in(found: Signature) -> tuple[Shape, ...]:
    """Returns the shapes in a signature."""
    args, kwargs = found
    return (*_shapes(args), *(each for _, value in kwargs for each in _shapes(value)))


def rebuilt(found: Signature, make: Callable[[Shape], Tensor]) -> tuple[Args, Kwargs]:
    """Returns arguments with this signature, and tensors made by ``make``."""
    args, kwargs = found
    return tuple(_rebuilt(args, make)), {name: _rebuilt(value, make) for name, value in kwargs}


_NO_SIZES: Final = (0,)

#: Arguments that may be kept, since they hold nothing.
_PLAIN: Final = (
    numbers.Number, str, bytes, type(None), types.EllipsisType, slice, enum.Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip

#: Replaces other arguments; not hashable.
_UNKNOWN: Final[list[Any]] = []


def _standing_for(value: Any, learns: bool) -> Any:
    if isinstance(value, Tensor):
        sizes = _NO_SIZES if value.is_nested else tuple(value.shape)
        learns = learns and value.requires_grad
        return Shape(sizes, value.dtype, learns, _times(value) if is_of_transform(value) else 1)
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple, torch.Size):
        return Items(tuple([_standing_for(each, learns) for each in value]), type(value) is list)
    if type(value) is float:
        return Real(value)
    if isinstance(value, _PLAIN):
        return value
    return None if isinstance(value, torch.Generator) else _UNKNOWN


def _times(tensor: Tensor) -> int:
    """Returns how many tensors of this shape a `torch.func.vmap` tensor holds."""
    inner = tensor
    while is_of_transform(inner) and (behind := behind_transform(inner)) is not inner:
        inner = behind
    count = tensor.numel()
    return max(inner.numel() // count, 1) if count else 1


def _shapes(value: Any) -> Iterator[Shape]:
    if isinstance(value, Shape):
        yield value
    elif isinstance(value, Items):
        for each in value.values:
            yield from _shapes(each)


def _rebuilt(value: Any, make: Callable[[Shape], Tensor]) -> Any:
    if isinstance(value, Shape):
        return make(value)
    if isinstance(value, Items):
        items = [_rebuilt(each, make) for each in value.values]
        return items if value.is_list else tuple(items)
    return value.value if isinstance(value, Real) else value
