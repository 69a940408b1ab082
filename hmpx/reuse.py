"""Casts of parameters used again within one call of the outermost module.

A parameter that is used many times in one forward, by a recurrent cell, under tied weights or in
Monte Carlo sampling, is then cast once. No key tells for sure that a tensor's values are what they
were: so a cast lives no longer than that call, and whatever may write past the version counter ends
it at once. Knows neither ops nor lists.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.utils.dlpack
from torch import Tensor, nn

from .compiler_internals import leave_to_callees
from .dtypes import CAST
from .patching import Draft, ItemPatch, Patch
from .torch_internals import STEP_HOOKS, has_tangents, transforms, uses

_data_ptr, _detach, _storage = Tensor.data_ptr, Tensor.detach, Tensor.untyped_storage
_widen = CAST[torch.float32]

_thread: Final = threading.local()  # .casts: those of the outermost module call that is running

#: Goes up whenever something may have written to a tensor past its version counter.
_epoch = 0


@dataclass(frozen=True, slots=True)
class _Cast:
    """A parameter's cast, and what shows that the parameter holds what it held."""

    parameter: nn.Parameter
    low: Tensor
    version: int
    pointer: int
    epoch: int


def cast(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """Returns ``tensor`` in ``dtype``; a parameter's cast of the running module call, if there is one.

    Gradients are those of casts made for each use: rounded one by one, and summed in the
    parameter's own dtype.
    """
    convert = CAST[dtype]
    if torch.compiler.is_dynamo_compiling() or type(tensor) is not nn.Parameter:
        return convert(tensor)
    casts = getattr(_thread, "casts", None)
    if casts is None or transforms() is not None or has_tangents():
        return convert(tensor)
    if tensor.is_inference():  # these count no versions
        return convert(tensor)
    needs_gradient = tensor.requires_grad and torch.is_grad_enabled()
    key = (id(tensor), dtype, torch.is_inference_mode_enabled())
    known: _Cast | None = casts.get(key)
    if known is not None and (
        known.parameter is tensor
        and known.version == tensor._version
        and known.pointer == _data_ptr(tensor)
        and known.epoch == _epoch
    ):
        if needs_gradient:
            return _Reused.apply(tensor, known.low)  # type: ignore[no-any-return, no-untyped-call]
        return known.low
    epoch = _epoch  # as it was before the values are read
    low = convert(tensor)
    if _is_unshared(tensor):
        casts[key] = _Cast(tensor, _detach(low), tensor._version, _data_ptr(tensor), epoch)
    return low


def _is_unshared(tensor: Tensor) -> bool:
    """Whether nothing else, such as what ``.data`` returned once, holds the tensor's memory."""
    # This Python object holds it as well.
    return uses(tensor) <= _UNSHARED


_A_TENSOR = torch.zeros(1)
_UNSHARED: Final = uses(_A_TENSOR)


class _Reused(torch.autograd.Function):
    """A cast made before, as a cast of its own."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, low: Tensor) -> Tensor:
        return _detach(low)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _widen(gradient), None


def patches(draft: Draft) -> Iterator[Patch | ItemPatch]:
    """Yields the patches that let casts live for a module call, and end where they must.

    Args:
        draft: Where torch is as it would be without a conversion.
    """
    yield Patch(nn.Module, "__call__", _outermost(draft.attribute(nn.Module, "__call__")))
    yield Patch(Tensor, "data", _EndingProperty(draft.attribute(Tensor, "data")))
    for name in _UNNOTICED:
        yield Patch(Tensor, name, _ending(draft.attribute(Tensor, name)))
    for owner in (torch, torch.utils.dlpack):
        yield Patch(owner, "to_dlpack", _ending(draft.attribute(owner, "to_dlpack")))
    yield ItemPatch(STEP_HOOKS, "hmpx", lambda *step: _end())  # fused ones write so


#: Methods through which a tensor's memory may be written to past its version counter.
_UNNOTICED: Final = (
    "__array__",
    "__dlpack__",
    "data_ptr",
    "numpy",
    "set_",
    "storage",
    "untyped_storage",
)


def _outermost(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``Module.__call__`` such that casts live as long as the outermost call."""

    @functools.wraps(call)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or getattr(_thread, "casts", None) is not None:
            return call(self, *args, **kwargs)
        _thread.casts = {}
        try:
            return call(self, *args, **kwargs)
        finally:
            _thread.casts = None

    leave_to_callees(wrapper)
    return wrapper


class _EndingProperty:
    """``Tensor.data``, whose value shares memory with the tensor but no version counter."""

    def __init__(self, slot: Any) -> None:
        self._slot = slot

    def __get__(self, tensor: Tensor | None, owner: type | None = None) -> Any:
        if tensor is None:
            return self
        _end()
        return self._slot.__get__(tensor, owner)

    def __set__(self, tensor: Tensor, value: Tensor) -> None:
        _end()
        self._slot.__set__(tensor, value)


def _ending(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``method`` such that it ends all casts."""

    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        _end()
        return method(*args, **kwargs)

    return wrapper


def _end() -> None:
    """Ends the casts that are kept now, in all threads."""
    global _epoch
    if not torch.compiler.is_dynamo_compiling():
        _epoch += 1
