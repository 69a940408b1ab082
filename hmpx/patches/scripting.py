"""TorchScript, whose code calls torch's kernels below all wrappers.

`torch.jit.script` compiles torch's unpatched functions. Given low-precision tensors beside fp32 weights, scripted
code would fail on mixed dtypes, so such a call runs in a region of torch.autocast.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..errors import HmpxWarning
from ..patching import Draft, Patch
from ..tensors import LOW_DTYPES, tensors_of
from ..torch_internals import SCRIPTED
from ..torch_state import has_casts


def patches(
    draft: Draft, run_suspended: Callable[..., Any], low_dtype: torch.dtype | None
) -> Iterator[Patch]:
    """Yields the patches of `torch.jit.script`, and of calls of what was scripted.

    Args:
        draft: Where torch is as it would be without a conversion.
        run_suspended: Calls a function without any of the conversion's patches.
        low_dtype: The conversion's low-precision type; None where that is not a torch dtype.
    """
    script = draft.attribute(torch.jit, "script")
    yield Patch(torch.jit, "script", _scripting_uncast(script, run_suspended))
    if low_dtype is not None:
        for kind in SCRIPTED:
            call = draft.attribute(kind, "__call__")
            yield Patch(kind, "__call__", _casting_inside(call, low_dtype))


def _casting_inside(call: Callable[..., Any], low_dtype: torch.dtype) -> Callable[..., Any]:
    """Returns ``call`` made to run in a region of torch.autocast where it is given low-precision tensors."""

    @functools.wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for tensor in tensors_of((args[1:], kwargs)):
            if tensor.dtype in LOW_DTYPES and has_casts(tensor.device.type):
                with torch.autocast(tensor.device.type, low_dtype):
                    return call(*args, **kwargs)
        return call(*args, **kwargs)

    return wrapper


def _scripting_uncast(
    script: Callable[..., Any], run_suspended: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns `torch.jit.script` made to see torch's own functions: it accepts no others."""
    has_warned = False

    @functools.wraps(script)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_warned
        is_by_torch = str(sys._getframe(1).f_globals.get("__name__")).startswith("torch.")
        if not has_warned and not is_by_torch:
            has_warned = True
            warnings.warn(
                "torch.jit.script takes torch's own functions only: what it scripts is not cast. "
                "Use torch.jit.trace or torch.export to have the casts in the graph",
                HmpxWarning,
                stacklevel=2,
            )
        return run_suspended(script, *args, **kwargs)

    return wrapper
