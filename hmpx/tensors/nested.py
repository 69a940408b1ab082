"""Arguments and results of calls: tensors, and lists and tuples of them at any depth."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_T = TypeVar("_T")

SEQUENCES: Final = (list, tuple)

#: Classes of tensors that only torch's own kernels compute with.
PLAIN_TENSORS: Final = frozenset({Tensor, torch.nn.Parameter})

#: Layouts of tensors that store only some of their elements.
SPARSE: Final = frozenset(
    {
        torch.sparse_coo,
        torch.sparse_csr,
        torch.sparse_csc,
        torch.sparse_bsr,
        torch.sparse_bsc,
    }
)

#: Classes of non-tensor arguments that don't affect dtypes.
NUMBERS: Final = frozenset({type(None), int, float, bool, complex})


def leaves(values: Iterable[Any]) -> list[Any]:
    """Returns ``values`` flattened: lists and tuples are replaced by their contents."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, SEQUENCES):
            found.extend(leaves(value))
        else:
            found.append(value)
    return found


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Returns the tensors among ``values``, also those inside lists and tuples."""
    return [value for value in leaves(values) if isinstance(value, Tensor)]


def is_floating(tensor: Tensor) -> bool:
    """Whether ``tensor`` is floating-point or complex."""
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def floating_in(values: Iterable[Any]) -> list[Tensor]:
    """Returns the floating-point and complex tensors among ``values``, also inside lists and tuples."""
    return [value for value in leaves(values) if isinstance(value, Tensor) and is_floating(value)]


def map_tensors(value: _T, function: Callable[[Tensor], Any]) -> _T:
    """Returns ``value`` with each tensor in it replaced by the result of ``function``.

    A list or tuple in which nothing changes is returned as the same object.
    """
    if isinstance(value, Tensor):
        return function(value)  # type: ignore[no-any-return]
    if isinstance(value, SEQUENCES):
        items = [map_tensors(item, function) for item in value]
        if all([new is old for new, old in zip(items, value, strict=True)]):  # noqa: C419  # twice as fast
            return value
        return with_items(value, items)  # type: ignore[no-any-return]
    return value


def with_items(sequence: Any, items: list[Any]) -> Any:
    """Returns a list or tuple that holds ``items``, with the class and attributes of ``sequence``.

    Classes written in Python may have constructors with any signature, so those are not called.
    """
    cls: Any = type(sequence)
    if cls is list:
        return items
    if cls is tuple:
        return tuple(items)
    if isinstance(sequence, list):
        made: Any = list.__new__(cls)
        list.extend(made, items)  # torch.fx's lists reject modification
    elif hasattr(cls, "_make"):  # named tuples; torch.compile traces this
        made = cls._make(items)
    elif cls.__new__ is tuple.__new__ or isinstance(cls.__new__, types.FunctionType):
        made = tuple.__new__(cls, items)
    else:
        made = cls(items)  # torch.return_types and torch.Size are made from one sequence
    if hasattr(sequence, "__dict__"):
        vars(made).update(vars(sequence))
    return made
