"""Values that are registered for the whole process, changed atomically by one thread at a time.

A registry's value is immutable: code that has read it keeps what it read. Conversions follow each change
and hold `LOCK` too.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Final, Generic, ParamSpec, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])
_P = ParamSpec("_P")
_T = TypeVar("_T")

#: Held while anything process-wide changes.
LOCK: Final = threading.RLock()

#: How long `eventually` waits. Changes take less time, unless users' code in them takes more.
_PATIENCE_S: Final = 2.0


def exclusive(function: _F) -> _F:
    """Wraps ``function`` so that its thread holds `LOCK` while it runs."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        # On one line, so that no interruption comes between the call and the release.
        with LOCK: return function(*args, **kwargs)  # fmt: skip  # noqa: E701

    return wrapper  # type: ignore[return-value]


def eventually(function: Callable[_P, None]) -> Callable[_P, None]:
    """Runs ``function`` as `exclusive` does, or later in a separate thread if `LOCK` stays taken.

    For calls during an import or a compilation: the thread that holds `LOCK` may wait for their locks.
    """
    held = exclusive(function)

    @functools.wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> None:
        if LOCK.acquire(timeout=_PATIENCE_S):
            try:
                function(*args, **kwargs)
            finally:
                LOCK.release()
        else:
            threading.Thread(target=held, args=args, kwargs=kwargs, daemon=True).start()

    return wrapper


class Registry(Generic[_T]):
    """A value that users change, and functions to call after each change."""

    def __init__(self, value: _T) -> None:
        self.value = value  # replaced, never modified
        self._followers: tuple[Callable[[], None], ...] = ()

    def followed_by(self, follower: Callable[[], None]) -> None:
        """Calls ``follower`` after each change from now on; an error that it raises undoes the change."""
        self._followers = (*self._followers, follower)

    def change(self, value: _T) -> None:
        """Replaces the value."""
        change_together((self, value))


@exclusive
def change_together(*changes: tuple[Registry[Any], Any]) -> None:
    """Replaces the values of registries together and calls their followers, or changes nothing."""
    before = [(registry, registry.value) for registry, _ in changes]
    changed = [registry for registry, value in changes if registry.value is not value]
    followers = dict.fromkeys(follow for registry in changed for follow in registry._followers)
    try:
        for registry, value in changes:
            registry.value = value
        for follow in followers:
            follow()
    except BaseException:
        for registry, value in before:
            registry.value = value
        for follow in followers:  # one may have acted before it raised
            follow()
        raise
