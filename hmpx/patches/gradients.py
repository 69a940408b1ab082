"""Gradients that a program computes itself: in hooks, and for `.grad`.

torch takes a gradient only in the dtype of its tensor. torch.autocast ends before the backward, so an fp32
gradient times an fp32 matrix is fp32 there. In hooks it is so here, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import get_default_nowrap_functions
from torch.utils.hooks import BackwardHook

from ..patching import Draft, Patch
from ..tensors import CAST, PLAIN_TENSORS
from ..torch_internals import NAMING_GETTERS
from ..torch_state import in_force, without_low_casts


def gradient_patches(draft: Draft) -> Iterator[Patch]:
    """Yields the patches of `Tensor.grad`, and of what registers or calls hooks."""
    grad = _grad(draft.attribute(Tensor, "grad"))
    yield Patch(Tensor, "grad", grad)
    # Subclasses of Tensor do not wrap what these return: `x.grad is x.grad` holds.
    getters = get_default_nowrap_functions() | {grad.__get__}
    for module in NAMING_GETTERS:
        yield Patch(module, "get_default_nowrap_functions", lambda: getters)
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        yield Patch(Tensor, name, _registering(draft.attribute(Tensor, name)))
    init = draft.attribute(BackwardHook, "__init__")

    @functools.wraps(init)
    def collect(self: Any, module: Any, user_hooks: Any, user_pre_hooks: Any) -> None:
        hooks, pre_hooks = ([_fitting(hook, 1) for hook in h] for h in (user_hooks, user_pre_hooks))
        init(self, module, hooks, pre_hooks)

    yield Patch(BackwardHook, "__init__", collect)


def _grad(slot: Any) -> property:
    def set_grad(tensor: Tensor, value: Any) -> None:
        if type(value) in PLAIN_TENSORS and type(tensor) in PLAIN_TENSORS:
            value = _cast(value, tensor.grad_dtype if tensor.is_leaf else tensor.dtype)
        slot.__set__(tensor, value)

    return property(slot.__get__, set_grad, slot.__delete__, slot.__doc__)


def _registering(register: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(register)
    def registering(self: Tensor, hook: Callable[..., Any]) -> Any:
        return register(self, _fitting(hook, 0))

    return registering


def _fitting(hook: Callable[..., Any], position: int) -> Callable[..., Any]:
    """Returns ``hook`` made to return the dtypes of the gradients that it is given at ``position``."""

    @functools.wraps(hook)
    def fitting(*args: Any) -> Any:
        if in_force() is None or torch.compiler.is_dynamo_compiling():
            return hook(*args)
        with without_low_casts():
            return _like(hook(*args), args[position])

    return fitting


def _like(value: Any, gradient: Any) -> Any:
    if isinstance(value, Tensor) and isinstance(gradient, Tensor):
        return _cast(value, gradient.dtype)
    is_several = isinstance(value, (tuple, list)) and isinstance(gradient, tuple)
    if is_several and len(value) == len(gradient):  # else torch raises an error
        return tuple(map(_like, value, gradient))
    return value


def _cast(value: Tensor, dtype: Any) -> Tensor:
    is_castable = dtype in CAST and dtype is not value.dtype and value.dtype in CAST
    return CAST[dtype](value) if is_castable else value
