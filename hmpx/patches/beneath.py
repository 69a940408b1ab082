"""Calls that bypass all wrappers: operators such as `torch.ops.aten.mm`, and TorchScript."""

from __future__ import annotations

import functools
import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from ..compute import Callee, in_fp32, inputs_of, may_run_again, note_legalized
from ..errors import HmpxWarning
from ..patching import Draft, Patch
from ..tensors import LOW_DTYPES, Args, Kwargs, tensors_of
from ..torch_internals import SCRIPTED, OpOverload, OpOverloadPacket, dispatch_modes
from ..torch_state import has_casts, in_force, is_below_dispatcher

# --- operators ---------------------------------------------------------------------------------


LOGGER: Final = logging.getLogger("hmpx")


def _complete(call: Callable[..., Any], operator: Any, /, *args: Any, **kwargs: Any) -> Any:
    try:
        return call(operator, *args, **kwargs)
    except Exception as error:
        again = _retry(functools.partial(call, operator), operator, error, args, kwargs)
        if again is None:
            raise
    return again()  # here nothing keeps the error's frames alive


def _retry(
    function: Callable[..., Any], operator: Any, error: Exception, args: Args, kwargs: Kwargs
) -> Callable[[], Any] | None:
    """Returns a function that computes the call in fp32; None if it failed for another reason."""
    # A traced graph would keep the failed call.
    if dispatch_modes() or is_below_dispatcher() or not may_run_again(error):
        return None
    inputs = inputs_of(args, kwargs)
    if inputs is None or inputs.low is None or not has_casts(inputs.low.device.type):
        return None
    is_one = isinstance(operator, OpOverload)
    overloads = [operator] if is_one else [getattr(operator, n) for n in operator.overloads()]
    arguments = [each for overload in overloads for each in overload._schema.arguments]
    names = [each.name for each in overloads[0]._schema.arguments if not each.kwarg_only]
    writes = {each.name for each in arguments if each.alias_info and each.alias_info.is_write}
    callee = Callee(str(operator), function, tuple(names), frozenset(writes), False, False)
    note_legalized()
    _log(callee.op)
    return functools.partial(in_fp32, callee, args, kwargs, inputs.first.dtype)


@functools.cache
def _log(operator: str) -> None:
    LOGGER.info("%s computes in fp32: it refuses the dtypes of its inputs", operator)


# --- TorchScript -------------------------------------------------------------------------------


#: Functions that were traced during a conversion: their graphs hold the casts.
_traced: Final[weakref.WeakSet[Any]] = weakref.WeakSet()


def patches(
    draft: Draft, run_suspended: Callable[..., Any], low_dtype: torch.dtype | None
) -> Iterator[Patch]:
    """Yields the patches of calls of operators and of scripted functions, and of `torch.jit`."""
    has_warned = False

    def script_uncast(script: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal has_warned
        is_by_torch = str(sys._getframe(2).f_globals.get("__name__")).startswith("torch.")
        if not has_warned and not is_by_torch:
            has_warned = True
            warnings.warn(
                "torch.jit.script takes only torch's own functions, so scripted code is not cast. "
                "Use torch.jit.trace or torch.export to have the casts in the graph",
                HmpxWarning,
                stacklevel=3,
            )
        return run_suspended(script, *args, **kwargs)

    def trace(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        traced = original(*args, **kwargs)
        if in_force() is not None:
            _traced.add(traced if isinstance(traced, SCRIPTED) else traced.forward)
        return traced

    def cast_inside(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if args[0] in _traced:
            return call(*args, **kwargs)
        for tensor in tensors_of((args[1:], kwargs)):
            if tensor.dtype in LOW_DTYPES and has_casts(tensor.device.type):
                with torch.autocast(tensor.device.type, low_dtype):
                    return call(*args, **kwargs)
        return call(*args, **kwargs)

    yield draft.around(torch.jit, "script", script_uncast)
    # torch.compile also patches it on its first use.
    yield draft.around(torch.jit, "trace", trace, stays_idle=True)
    if low_dtype is not None:
        yield from [draft.around(kind, "__call__", cast_inside) for kind in SCRIPTED]
    for operator_class in (OpOverload, OpOverloadPacket):
        yield draft.around(operator_class, "__call__", _complete)
