"""What models are given and return: tensors in lists, tuples, mappings and dataclasses at any depth."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .dtypes import LOW_DTYPES
from .nested import SEQUENCES, with_items


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in ``value``, in its order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, SEQUENCES):
        for each in value:
            yield from tensors_of(each)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_of(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name, None))


def floats_of(value: Any) -> list[Tensor]:
    """Returns the dense real floating-point tensors in ``value`` that have elements."""
    return [
        each
        for each in tensors_of(value)
        if each.dtype.is_floating_point and is_dense(each) and each.numel()
    ]


def is_dense(tensor: Tensor) -> bool:
    """Whether each element of ``tensor`` is stored."""
    return tensor.layout is torch.strided and not tensor.is_nested


def map_all(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Returns what a model is given with each tensor in it replaced by the result of ``function``."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, SEQUENCES):
        return with_items(value, [map_all(each, function) for each in value])
    if isinstance(value, Mapping):
        result: Any = copy.copy(value)
        for name, each in value.items():
            result[name] = map_all(each, function)
        return result
    return value


def copied(value: Any) -> Any:
    """Returns ``value`` with copies of its tensors, which the model may write to."""
    return map_all(value, lambda each: each.detach().clone().requires_grad_(each.requires_grad))


def widened(value: Any) -> Any:
    """Returns ``value`` with every low-precision tensor in it upcast; the same object without any."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in LOW_DTYPES else value
    if isinstance(value, SEQUENCES):
        items = [widened(item) for item in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return with_items(value, items)
    if isinstance(value, dict):
        items = list(value.items())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value)]
        items = [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    else:
        return value
    result = value
    for key, item in items:
        wide = widened(item)
        if wide is item:
            continue
        if result is value:
            # torch.compile traces copies of any class but this one
            result = dict(value) if type(value) is dict else copy.copy(value)
        if isinstance(value, dict):
            result[key] = wide
        else:
            object.__setattr__(result, key, wide)  # the class may be frozen
    return result
