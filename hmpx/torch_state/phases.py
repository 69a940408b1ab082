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


def recomputed_later(function: _F) -> _F:
    """Makes each call of a checkpoint's ``function`` but the first count as recomputation."""
    has_run = False

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_run
        if not has_run:
            has_run = True
            return function(*args, **kwargs)
        before = _here.is_recomputing
        try:
            _here.is_recomputing = True
            return function(*args, **kwargs)
        finally:
            _here.is_recomputing = before

    return wrapper  # type: ignore[return-value]
