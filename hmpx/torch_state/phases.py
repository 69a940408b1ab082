"""The phase of a training step that a call belongs to: forward, recomputation or backward."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Final, Literal, TypeVar

from ..torch_internals import current_graph_task

_F = TypeVar("_F", bound=Callable[..., Any])

Phase = Literal["forward", "recompute", "backward"]


class _Here(threading.local):
    """What is running in a thread.

    Attributes:
        is_recomputing: A checkpoint runs its function again.
    """

    is_recomputing = False


_here: Final = _Here()


def phase() -> Phase:
    """Returns the phase of a call made here.

    ``"recompute"`` inside what a checkpoint runs again, ``"backward"`` in the other Python code that
    autograd's engine calls: that of `torch.autograd.Function` and of hooks.
    """
    if _here.is_recomputing:
        return "recompute"
    return "forward" if current_graph_task() == -1 else "backward"


def as_recomputation(function: _F, *, after_first: bool) -> _F:
    """Makes calls of a checkpoint's ``function`` count as recomputation.

    Args:
        function: What it computes.
        after_first: The first call is the forward.
    """
    is_forward = after_first

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_forward
        before = _here.is_recomputing
        try:
            _here.is_recomputing = before or not is_forward
            is_forward = False
            return function(*args, **kwargs)
        finally:
            _here.is_recomputing = before

    return wrapper  # type: ignore[return-value]
