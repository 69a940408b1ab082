"""Numbers that new tensors of a low-precision dtype are filled with, while torch is converted.

`torch.full` and `Tensor.new_full` are no ops: they compute nothing, and no list names them. A program
that runs in fp32 may give them a dtype that it has read off a tensor, and then a number that this dtype
does not hold. Owns the patches of these two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from .. import torch_state
from ..compute import held
from ..patching import Draft, Patch
from ..tensors import LOW_DTYPES, is_low
from ..torch_internals import device_constructors
from .compiled import unwrapped


def filled_patches(draft: Draft) -> Iterator[Patch]:
    """Yields the patches by which numbers that a low-precision dtype does not hold fill new tensors."""
    device_constructors()  # has torch know its own `torch.full`
    yield Patch(torch, "full", _full(draft.attribute(torch, "full")))
    yield Patch(Tensor, "new_full", _new_full(draft.attribute(Tensor, "new_full")))


def _full(original: Callable[..., Any]) -> Callable[..., Any]:
    def full(*args: Any, **kwargs: Any) -> Any:
        return _filled(original, kwargs.get("dtype"), args, kwargs)

    return named_after(original, full, "full")


def _new_full(original: Callable[..., Any]) -> Callable[..., Any]:
    def new_full(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.dtype not in LOW_DTYPES and not kwargs:
            return original(self, *args)
        if has_torch_function_unary(self):
            return handle_torch_function(new_full, (self,), self, *args, **kwargs)
        return _filled(original, kwargs.get("dtype") or self.dtype, (self, *args), kwargs)

    return named_after(original, new_full, "new_full", Tensor)


def _filled(
    original: Callable[..., Any],
    dtype: torch.dtype | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Returns the tensor that ``original`` makes; its number is the last of ``args``, or ``fill_value``."""
    if not is_low(dtype):
        return original(*args, **kwargs)
    given = kwargs.get("fill_value", args[-1] if args else None)
    number = held(given, dtype)
    if number is given or torch_state.in_force() is None or torch_state.is_off():
        return original(*args, **kwargs)
    if "fill_value" in kwargs:
        return original(*args, **{**kwargs, "fill_value": number})
    return original(*args[:-1], number, **kwargs)


def named_after(
    original: Any, function: Callable[..., Any], name: str, owner: Any = torch
) -> Callable[..., Any]:
    """Makes ``function`` look like torch's ``original``, which is at ``owner.name``; returns it."""
    qualified = name if owner is torch else f"Tensor.{name}"
    function.__module__, function.__name__, function.__qualname__ = "torch", name, qualified
    function.__doc__ = original.__doc__
    vars(function).update(__wrapped__=unwrapped(original), __hmpx_filled__=True)
    return function
