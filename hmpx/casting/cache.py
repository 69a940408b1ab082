"""Reuses casts of parameters within one call of the outermost module.

A parameter that is used many times in one forward, by a recurrent cell, under tied weights or in
Monte Carlo sampling, is then cast once. No key proves that a tensor's values are unchanged, so a
cast lives at most as long as that call. Any possible write to the parameter or to the cast that
bypasses the version counter ends all casts at once.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.utils.dlpack
from torch import Tensor, nn

from ..patching import Draft, ItemPatch, Patch
from ..tensors import CAST
from ..torch_internals import STEP_HOOKS, has_tangents, leave_to_callees, transforms, uses

_data_ptr, _detach, _storage = Tensor.data_ptr, Tensor.detach, Tensor.untyped_storage
_widen = CAST[torch.float32]

_thread: Final = threading.local()  # .casts: those of the running outermost module call

#: Changes whenever something may write to a tensor that bypasses its version counter.
_epoch = 0
_epochs: Final = itertools.count(1)  # no number repeats, whichever threads draw them


@dataclass(slots=True)
class _Cast:
    """A parameter's cast, and the data to check that both still hold the same values."""

    parameter: nn.Parameter
    low: Tensor  # its cast
    version: int  # the parameter's version counter
    low_version: int | None  # the cast's; None if it has none
    pointer: int  # to the parameter's values


#: The casts of one module call: by a parameter's id, the dtype, and whether inference mode is on.
_Casts = dict[tuple[int, torch.dtype, bool], _Cast]

_running: Final[dict[int, _Casts]] = {}  # those of all running module calls, by id


def cast(dtype: torch.dtype, is_only_read: bool, tensor: Tensor) -> Tensor:
    """Returns ``tensor`` in ``dtype``; a parameter's cast is reused within the running module call.

    Gradients equal those of separate casts for each use: each is rounded, and they are summed in the
    parameter's own dtype.
    """
    convert = CAST[dtype]
    if torch.compiler.is_dynamo_compiling() or type(tensor) is not nn.Parameter:
        return convert(tensor)
    casts: _Casts | None = getattr(_thread, "casts", None)
    if casts is None or transforms() is not None or has_tangents():
        return convert(tensor)
    if tensor.is_inference():  # these have no version counter
        return convert(tensor)
    needs_gradient = tensor.requires_grad and torch.is_grad_enabled()
    key = (id(tensor), dtype, torch.is_inference_mode_enabled())
    known = casts.get(key)
    if known is not None and _is_fresh(known, tensor):
        if not is_only_read and known.low_version is None:
            return convert(tensor)
        if needs_gradient:
            return _Reused.apply(tensor, known.low)  # type: ignore[no-any-return, no-untyped-call]
        return known.low
    epoch = _epoch  # read before the values
    low = convert(tensor)
    low_version = None if low.is_inference() else low._version
    if _is_unshared(tensor) and (is_only_read or low_version is not None):
        casts[key] = _Cast(tensor, _detach(low), tensor._version, low_version, _data_ptr(tensor))
        if epoch != _epoch:  # another thread has ended casts meanwhile, perhaps this one
            casts.pop(key, None)
    return low


def _is_fresh(known: _Cast, tensor: Tensor) -> bool:
    """Whether a cast still matches the values of ``tensor``."""
    return (
        known.parameter is tensor
        and known.version == tensor._version
        and known.pointer == _data_ptr(tensor)
        and (known.low_version is None or known.low_version == known.low._version)
    )


def _is_unshared(tensor: Tensor) -> bool:
    """Whether nothing else holds the tensor's memory, such as a tensor that ``.data`` once returned."""
    # This Python object counts too. Storages that torch did not allocate may overlap others.
    return uses(tensor) <= _UNSHARED and bool(_storage(tensor).resizable())


_A_TENSOR = torch.zeros(1)
_UNSHARED: Final = uses(_A_TENSOR)


class _Reused(torch.autograd.Function):
    """Makes a reused cast behave like a separate one in autograd."""

    drawn_as = "cast"

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, low: Tensor) -> Tensor:
        return _detach(low)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _widen(gradient), None


def cache_patches(draft: Draft) -> Iterator[Patch]:
    """Yields the patches that keep casts for a module call, and end them on writes."""
    yield Patch(nn.Module, "__call__", _outermost(draft.attribute(nn.Module, "__call__")))
    data = draft.attribute(
        Tensor, "data"
    )  # it shares memory with the tensor but no version counter
    yield Patch(Tensor, "data", property(_ending(data.__get__), _ending(data.__set__)))
    for name in _UNNOTICED:
        yield Patch(Tensor, name, _ending(draft.attribute(Tensor, name)))
    for owner in (torch, torch.utils.dlpack):
        yield Patch(owner, "to_dlpack", _ending(draft.attribute(owner, "to_dlpack")))
    yield ItemPatch(STEP_HOOKS, "hmpx", lambda *step: _end())  # fused steps bypass version counters


#: Methods through which a tensor's memory may be written to, bypassing its version counter.
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
    """Keeps casts during the outermost call of ``Module.__call__``."""

    @functools.wraps(call)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or getattr(_thread, "casts", None) is not None:
            return call(self, *args, **kwargs)
        casts: _Casts = {}
        try:
            _running[id(casts)] = _thread.casts = casts
            return call(self, *args, **kwargs)
        finally:
            _thread.casts = None
            _running.pop(id(casts), None)

    leave_to_callees(wrapper)
    return wrapper


def _ending(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        _end()
        return method(*args, **kwargs)

    return wrapper


def _end() -> None:
    """Ends all casts that are currently kept, in all threads."""
    global _epoch
    if not torch.compiler.is_dynamo_compiling() and _running:
        _epoch = next(_epochs)
        for casts in list(_running.values()):
            casts.clear()
