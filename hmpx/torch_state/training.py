"""Whether a call counts as training, which decides the kernels that are compared.

Checking whether gradients are recorded is not enough. The forward of a `torch.autograd.Function`
records none, and its backward may run the same calls again, recording them, as a reentrant checkpoint
does. The choice for a call must be the same both times.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch

from ..torch_internals import TRAINING_MARK

_F = TypeVar("_F", bound=Callable[..., Any])


class _Here(threading.local):
    """What is running in a thread.

    Attributes:
        is_training: Calls count as training, whether or not gradients are recorded.
    """

    is_training = False


_here: Final = _Here()
_was_marked = False  # in any thread, ever: until then nothing checks
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling

# Marked where torch.compile sees it as well, and guards on it: in the autocast bit of a device type
# that torch has no kernels for.
_MARK: Final = TRAINING_MARK


def is_training() -> bool:
    """Whether a call made here counts as training.

    It does where gradients are recorded, and in code that may run again to compute gradients. Whether
    an input requires a gradient does not matter: in a checkpoint's forward, intermediate results
    don't show that.
    """
    return torch.is_grad_enabled() or (_was_marked and _is_marked())


def _is_marked() -> bool:
    return torch.is_autocast_enabled(_MARK) if _is_dynamo_compiling() else _here.is_training


def as_training(function: _F) -> _F:
    """Makes all calls of ``function`` count as training."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        global _was_marked
        _was_marked = True
        before, was_marked = _here.is_training, torch.is_autocast_enabled(_MARK)
        try:
            _here.is_training = True
            torch.set_autocast_enabled(_MARK, True)
            return function(*args, **kwargs)
        finally:
            _here.is_training = before
            torch.set_autocast_enabled(_MARK, was_marked)

    return wrapper  # type: ignore[return-value]


def keeps_kind(function: _F) -> _F:
    """Makes ``function`` run as training wherever it would here and now.

    This is for functions that are called later, such as by a checkpoint's recomputation.
    """
    return as_training(function) if is_training() else function
