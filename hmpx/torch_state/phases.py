"""The phase of a step for a call, and whether the call counts as training.

It is not enough to check whether gradients are recorded. The forward of a `torch.autograd.Function`
records none, but its backward may rerun the same calls and record them, as a reentrant checkpoint
does. Both runs of a call must use the same kernels.
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


class _PhaseState(threading.local):
    """The state of a thread."""

    is_recomputing = False  # a checkpoint reruns its function
    is_training = False  # calls count as training, whether or not gradients are recorded


_here: Final = _PhaseState()
_was_marked = False  # ever, in any thread: enables the checks
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling


def phase() -> Phase:
    """Returns the phase of a call.

    ``"recompute"`` when a checkpoint reruns its forward; ``"backward"`` in other Python code that
    autograd's engine calls, in `torch.autograd.Function` and hooks.
    """
    if _here.is_recomputing:
        return "recompute"
    return "forward" if current_graph_task() == -1 else "backward"


def as_recomputation(function: _F, *, after_first: bool) -> _F:
    """Makes calls of a checkpoint's ``function`` count as recomputation."""
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
    """Whether a call counts as training.

    It does if gradients are recorded, and in code that may rerun to compute gradients. Whether an
    input requires a gradient does not matter: intermediate results of a checkpoint's forward don't
    show that.
    """
    return torch.is_grad_enabled() or (_was_marked and _is_marked())


def _is_marked() -> bool:
    """Whether training is marked in this thread, or in the bit on which torch.compile guards."""
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
    """Makes ``function`` run as training if it currently would.

    For functions that are called later, such as by a checkpoint's recomputation.
    """
    return as_training(function) if is_training() else function
