"""Tensors that programs create, keep or pass on other than by calling ops.

A program's own gradients, numbers that fill tensors, branches and loops that torch traces, and tensors for
numpy. An fp32 program has fp32 there; casts elsewhere must not stop it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import (
    get_default_nowrap_functions,
    handle_torch_function,
    has_torch_function_unary,
)
from torch.utils.hooks import BackwardHook

from .. import torch_state
from ..compute import held, widen
from ..patching import Draft, Patch
from ..tensors import CAST, LOW_DTYPES, PLAIN_TENSORS, SEQUENCES, is_low, widened, with_items
from ..torch_internals import NAMING_GETTERS, device_constructors, leave_uncompiled
from ..torch_state import in_force, is_off, without_low_casts
from .compiled import unwrapped


def value_patches(draft: Draft) -> Iterator[Patch]:
    """Yields the patches of functions that fill, branch, loop, take gradients, or make arrays of numpy."""
    device_constructors()  # makes torch cache its own `torch.full`
    yield Patch(torch, "full", _full(draft.attribute(torch, "full")))
    yield Patch(Tensor, "new_full", _new_full(draft.attribute(Tensor, "new_full")))
    for name, settle in (("cond", _cond), ("while_loop", _while_loop)):
        if hasattr(torch, name):  # both are prototypes
            original = draft.attribute(torch, name)
            wrapper = named_after(original, settle(original), name)
            package = original.__globals__["__package__"]  # torch imports it from there
            yield Patch(torch, name, wrapper)
            yield Patch(sys.modules[package], name, wrapper)
    grad = _grad(draft.attribute(Tensor, "grad"))
    yield Patch(Tensor, "grad", grad)
    # Subclasses of Tensor do not wrap their results: `x.grad is x.grad` holds.
    getters = get_default_nowrap_functions() | {grad.__get__}
    for module in NAMING_GETTERS:
        yield Patch(module, "get_default_nowrap_functions", lambda: getters)
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        yield draft.around(Tensor, name, _register)
    yield draft.around(BackwardHook, "__init__", _collect)
    numpy_patch = draft.around(Tensor, "numpy", _numpy)
    for each in (numpy_patch.value, _numpy):  # graphs of their own would call them for their arrays
        leave_uncompiled(each, with_callees=False)
    yield numpy_patch
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "from_dlpack"):
        yield draft.around(numpy, "from_dlpack", _from_dlpack)


# --- numbers that new tensors are filled with, even those that a low dtype does not hold --------


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
    """Returns the tensor that ``original`` creates; its number is the last of ``args``, or ``fill_value``."""
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
    """Makes ``function`` look like torch's ``original`` at ``owner.name``; returns it."""
    qualified = name if owner is torch else f"Tensor.{name}"
    function.__module__, function.__name__, function.__qualname__ = "torch", name, qualified
    function.__doc__ = original.__doc__
    vars(function).update(__wrapped__=unwrapped(original), __hmpx_filled__=True)
    return function


# --- branches and loops that torch traces: results get the dtypes that it expects ---------------


def _cond(original: Callable[..., Any]) -> Callable[..., Any]:
    def cond(pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
        if is_off():
            return original(pred, true_fn, false_fn, operands)

        def widening(branch: Any) -> Any:
            return lambda *args: widened(branch(*args))

        return original(pred, widening(true_fn), widening(false_fn), operands)

    return cond


def _while_loop(original: Callable[..., Any]) -> Callable[..., Any]:
    def while_loop(cond_fn: Any, body_fn: Callable[..., Any], carried_inputs: Any) -> Any:
        def body(*carried: Any) -> Any:
            return _alike(body_fn(*carried), carried)

        return original(cond_fn, body, carried_inputs)

    return while_loop


def _alike(value: Any, given: Any) -> Any:
    """Returns ``value`` with the dtypes of ``given`` where both are floating, at any depth."""
    if isinstance(value, Tensor) and isinstance(given, Tensor):
        return _cast(value, given.dtype)
    is_several = isinstance(value, SEQUENCES) and isinstance(given, SEQUENCES)
    if is_several and len(value) == len(given):  # else torch raises an error
        return with_items(value, [*map(_alike, value, given)])
    if isinstance(value, dict) and isinstance(given, dict):
        return {key: _alike(each, given.get(key)) for key, each in value.items()}
    return value


# --- gradients from hooks, and for `.grad` -----------------------------------------------------


def _grad(slot: Any) -> property:
    def set_grad(tensor: Tensor, value: Any) -> None:
        if type(value) in PLAIN_TENSORS and type(tensor) in PLAIN_TENSORS:
            value = _cast(value, tensor.grad_dtype if tensor.is_leaf else tensor.dtype)
        slot.__set__(tensor, value)

    return property(slot.__get__, set_grad, slot.__delete__, slot.__doc__)


def _register(register: Callable[..., Any], tensor: Tensor, hook: Callable[..., Any]) -> Any:
    return register(tensor, _fitting(hook, 0))


def _collect(
    init: Callable[..., Any], self: Any, module: Any, user_hooks: Any, user_pre_hooks: Any
) -> None:
    hooks, pre_hooks = ([_fitting(hook, 1) for hook in h] for h in (user_hooks, user_pre_hooks))
    init(self, module, hooks, pre_hooks)


def _fitting(hook: Callable[..., Any], position: int) -> Callable[..., Any]:
    """Makes ``hook`` return gradients in the dtypes of those that it gets at ``position``."""

    @functools.wraps(hook)
    def fitting(*args: Any) -> Any:
        if in_force() is None or torch.compiler.is_dynamo_compiling():
            return hook(*args)
        with without_low_casts():
            return _alike(hook(*args), args[position])

    return fitting


def _cast(value: Tensor, dtype: Any) -> Tensor:
    is_castable = dtype in CAST and dtype is not value.dtype and value.dtype in CAST
    return CAST[dtype](value) if is_castable else value


# --- numpy, which gets float32 copies of bfloat16 tensors instead of views ----------------------


def _numpy(original: Callable[..., Any], tensor: Tensor, /, *args: Any, **kwargs: Any) -> Any:
    if has_torch_function_unary(tensor):
        return handle_torch_function(Tensor.numpy, (tensor,), tensor, *args, **kwargs)
    return original(_known_to_numpy(tensor), *args, **kwargs)


def _from_dlpack(original: Callable[..., Any], x: Any, /, **kwargs: Any) -> Any:
    return original(_known_to_numpy(x) if isinstance(x, Tensor) else x, **kwargs)


def _known_to_numpy(tensor: Tensor) -> Tensor:
    """Returns ``tensor``, or its values in float32 if it is bfloat16 and torch is converted."""
    is_bf16 = tensor.dtype is torch.bfloat16
    return widen(tensor) if is_bf16 and torch_state.in_force() is not None else tensor
