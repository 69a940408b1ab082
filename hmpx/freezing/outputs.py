"""The outputs of a frozen model, in float32."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from torch import Tensor, nn

from ..tensors import LOW_DTYPES, SEQUENCES, with_items


class WidensOutputs:
    """A forward hook that returns float32 where the model returns bfloat16 or float16."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Returns the module's output, upcast."""
        return _widened(output)


def _widened(value: Any) -> Any:
    """Returns ``value`` with every low-precision tensor in it upcast; the same object without any."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in LOW_DTYPES else value
    if isinstance(value, SEQUENCES):
        items = [_widened(item) for item in value]
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
        widened = _widened(item)
        if widened is item:
            continue
        if result is value:
            # torch.compile traces copies of any class but this one
            result = dict(value) if type(value) is dict else copy.copy(value)
        if isinstance(value, dict):
            result[key] = widened
        else:
            object.__setattr__(result, key, widened)  # the class may be frozen
    return result
