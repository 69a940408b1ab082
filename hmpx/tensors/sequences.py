"""Lists and tuples with other items, in their own classes."""

from __future__ import annotations

import types
from typing import Any


def with_items(sequence: Any, items: list[Any]) -> Any:
    """Returns a list or tuple like ``sequence``, of its class and attributes, that holds ``items``.

    Constructors of classes written in Python may take anything, and are not called.
    """
    cls: Any = type(sequence)
    if cls is list:
        return items
    if cls is tuple:
        return tuple(items)
    if isinstance(sequence, list):
        made: Any = list.__new__(cls)
        list.extend(made, items)  # torch.fx's lists refuse changes
    elif hasattr(cls, "_make"):  # named tuples; torch.compile traces this
        made = cls._make(items)
    elif cls.__new__ is tuple.__new__ or isinstance(cls.__new__, types.FunctionType):
        made = tuple.__new__(cls, items)
    else:
        made = cls(items)  # torch.return_types and torch.Size are made from one sequence
    if hasattr(sequence, "__dict__"):
        vars(made).update(vars(sequence))
    return made
