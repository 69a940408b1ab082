"""What a change of the conversion in force needs beside its patches: quiet, and fresh caches."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from .. import torch_state
from ..patches import forget_compiled, forget_overrides

_F = TypeVar("_F", bound=Callable[..., None])

_amid: Final = threading.Lock()
_left_for_later: Final[list[Callable[[], None]]] = []


def alone(function: _F) -> _F:
    """Postpones a call that comes during another change of the same thread until that change is done.

    Signal handlers and finalizers make such calls. The thread holds `registry.LOCK`.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        if _amid.locked():
            _left_for_later.append(functools.partial(function, *args, **kwargs))
            return
        try:
            # On one line, so that no signal arrives between the call and the release.
            with _amid: function(*args, **kwargs)  # fmt: skip  # noqa: E701
        finally:
            while _left_for_later:
                later = _left_for_later.pop(0)
                with _amid: later()  # fmt: skip  # noqa: E701

    return wrapper  # type: ignore[return-value]


@contextlib.contextmanager
def paused_gc() -> Iterator[None]:
    """Keeps the thousands of small objects of a conversion from setting off full collections.

    With torch loaded each takes as long as the whole conversion.
    """
    restore = gc.enable if gc.isenabled() else gc.disable
    try:
        try:
            gc.disable()
            yield
        finally:
            restore()
    finally:  # in case that an exception came right before
        restore()


def forget_what_is_cached(*, stays: bool = False) -> None:
    """Clears what torch has cached about its functions.

    Args:
        stays: Keep the compiled graphs, since an equal conversion may follow.
    """
    torch_state.forget_modules()
    forget_compiled(stays=stays)
    forget_overrides()
