"""Values that are registered for the whole process, changed atomically by one thread at a time.

A registry's value is immutable: code that has read it keeps what it read. Conversions follow each change
and hold `LOCK` too.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, Final, Generic, ParamSpec, TypeVar

from .forks import holding, new_lock

_P = ParamSpec("_P")
_T = TypeVar("_T")

#: Held while anything process-wide changes.
LOCK: Final = new_lock()
exclusive: Final = holding(LOCK)

#: How long `eventually` waits. Changes take less time, unless users' code in them takes more.
_PATIENCE_S: Final = 2.0


def eventually(function: Callable[_P, None]) -> Callable[_P, None]:
    """Runs ``function`` as `exclusive` does, or later in a separate thread if `LOCK` stays taken.

    For calls during an import or a compilation: the thread that holds `LOCK` may wait for their locks.
    """

    @functools.wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> None:
        if LOCK.acquire(timeout=_PATIENCE_S):
            try:
                function(*args, **kwargs)
            finally:
                LOCK.release()
        else:
            _late.append(functools.partial(function, *args, **kwargs))
            _start_late()

    return wrapper


_late: Final[list[Callable[[], None]]] = []  # calls that wait for `LOCK`, each in a thread


@exclusive
def _run_late() -> None:
    if _late:
        _late.pop(0)()


def _start_late() -> None:
    for _ in _late:
        threading.Thread(target=_run_late, daemon=True).start()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_late)  # the threads are missing there


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
