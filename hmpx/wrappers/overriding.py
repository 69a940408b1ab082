"""Calls that a mode or a tensor subclass overrides by ``__torch_function__``."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ..tensors import SEQUENCES, Args, Kwargs, leaves
from ..torch_internals import DisableTorchFunctionSubclass
from ..torch_state import is_off
from .retiring import in_slot


def is_overridden(args: Args, kwargs: Kwargs) -> bool:
    """Whether a mode, or the class of an argument or of one in a list, overrides torch functions."""
    if has_torch_function(args):
        return True
    for value in args:
        if isinstance(value, SEQUENCES) and has_torch_function(value):
            return True
    return bool(kwargs) and is_overridden(tuple(kwargs.values()), {})


def hands_over(function: Callable[..., Any]) -> bool:
    """Whether torch has modes and tensor subclasses override a function of its own.

    One that is implemented in Python does that itself, or else leaves it to what it calls.
    """
    code = getattr(function, "__code__", None)
    return code is None or handle_torch_function.__name__ in code.co_names


def override(
    original: Callable[..., Any],
    site: str,
    cast: Callable[[Args, Kwargs], tuple[Args, Kwargs]],
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Passes a call of the wrapper in a slot to the ``__torch_function__`` of a mode or an argument.

    It is handed what stands under the function's name now, and the arguments as they came: what it
    calls in turn is cast. But a class that says by ``__torch_dispatch__`` alone how it computes is a
    tensor to be cast.
    """
    wrapper = in_slot(site, original)
    relevant = leaves((*args, *kwargs.values()))
    if not is_off() and any(_is_tensor_by_dispatch(value) for value in relevant):
        with DisableTorchFunctionSubclass():
            args, kwargs = cast(args, kwargs)
        relevant = leaves((*args, *kwargs.values()))
    if isinstance(original, types.FunctionType):
        return _override_python(original, wrapper, relevant, args, kwargs)
    if not isinstance(original, types.BuiltinFunctionType):  # methods are looked up by torch too
        return original(*args, **kwargs)
    return handle_torch_function(wrapper, relevant, *args, **kwargs)


def _override_python(
    original: Callable[..., Any],
    wrapper: Callable[..., Any],
    relevant: list[Any],
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Passes a call of ``wrapper``, whose function is a Python one, to a mode or an argument.

    Called as it is, such a function may hand over itself, which casts nothing, rather than what stands
    under its name; or go on to what it calls, which would be cast op by op.
    """
    if not hands_over(original):
        return original(*args, **kwargs)
    if "NotImplemented" not in original.__code__.co_names:
        return handle_torch_function(wrapper, relevant, *args, **kwargs)
    try:  # operators let the other operand try
        return handle_torch_function(wrapper, relevant, *args, **kwargs)
    except TypeError:
        return NotImplemented


def _is_tensor_by_dispatch(value: Any) -> bool:
    """Whether the class of ``value`` says by ``__torch_dispatch__`` how it computes, and not before.

    A ``__torch_function__`` of torch's own either calls what it is handed, or as that of jagged tensors
    computes with what no wrapper reaches.
    """
    kind = type(value)
    if not isinstance(value, Tensor) or kind.__torch_dispatch__ is Tensor.__torch_dispatch__:
        return False
    module: Any = getattr(kind.__torch_function__, "__module__", None)
    return isinstance(module, str) and module.partition(".")[0] == "torch"
