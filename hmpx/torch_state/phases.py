"""The phase of a step that a call belongs to, and whether the call counts as training.

Checking whether gradients are recorded is not enough for that. The forward of a `torch.autograd.Function`
records none, and its backward may run the same calls again, recording them, as a reentrant checkpoint
does. The choice of kernels for a call must be the same both times.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Final, Literal, TypeVar

import torch

from ..torch_internals import TRAINING_MARK, current_graph_task

_F = TypeVar("_F", bound=Callable[..., Any])

Phase = Literal["forward", "recompute", "backward"]


class _Here(threading.local):
    """What is running in a thread.

    Attributes:
        is_recomputing: A checkpoint runs its function again.
        is_training: Calls count as training, whether or not gradients are recorded.
    """

    is_recomputing = False
    is_training = False


_here: Final = _Here()
_was_marked = False  # in any thread, ever: until then nothing checks
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling


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


def is_training() -> bool:
    """Whether a call made here counts as training.

    It does where gradients are recorded, and in code that may run again to compute gradients. Whether
    an input requires a gradient does not matter: in a checkpoint's forward, intermediate results
    don't show that.
    """
    return torch.is_grad_enabled() or (_was_marked and _is_marked())


def _is_marked() -> bool:
    """Whether it is marked, in the bit that torch.compile sees and guards on, or in this thread."""
    return torch.is_autocast_enabled(TRAINING_MARK) if _is_dynamo_compiling() else _here.is_training


def as_training(function: _F) -> _F:
    """Makes all calls of ``function`` count as training."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        global _was_marked
        _was_marked = True
        before, was_marked = _here.is_training, torch.is_autocast_enabled(TRAINING_MARK)
        try:
            _here.is_training = True
            torch.set_autocast_enabled(TRAINING_MARK, True)
            return function(*args, **kwargs)
        finally:
            _here.is_training = before
            torch.set_autocast_enabled(TRAINING_MARK, was_marked)

    return wrapper  # type: ignore[return-value]


def keeps_kind(function: _F) -> _F:
    """Makes ``function`` run as training wherever it would here and now.

    This is for functions that are called later, such as by a checkpoint's recomputation.
    """
    return as_training(function) if is_training() else function
