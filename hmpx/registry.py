"""Values that are registered for the whole process, changed atomically by one thread at a time.

A registry's value is immutable: code that has read it keeps what it read. Conversions follow each change
and hold `LOCK` too. A fork waits for `LOCK`, so a child process sees no half-made change.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Final, Generic, ParamSpec, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])
_P = ParamSpec("_P")
_T = TypeVar("_T")

#: Held while anything process-wide changes.
LOCK: Final = threading.RLock()

_a_fork_waits = False

#: Locks that a fork waits for. `_entry` is held while one is added.
_forkless: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
_entry: Final = threading.RLock()

#: A limit, because the forking thread may hold an import lock that the block itself waits for.
_LONGEST_WAIT_S: Final = 10.0

#: How long `eventually` waits. Changes take less time, unless users' code in them takes more.
_PATIENCE_S: Final = 2.0


def hold_off_forks(lock: Any) -> None:
    """Makes forks wait while this thread holds ``lock``.

    A child that is forked amid an import would wait forever for that import's lock.
    """
    with _entry: _forkless.add(lock)  # fmt: skip  # noqa: E701


def _before_fork() -> None:
    global _a_fork_waits
    _a_fork_waits = True
    _entry.acquire()
    for lock in tuple(_forkless):
        if lock.acquire(timeout=_LONGEST_WAIT_S):
            lock.release()
    LOCK.acquire()
    _a_fork_waits = False


def _after_fork() -> None:
    LOCK.release()
    _entry.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork
    )


def exclusive(function: _F) -> _F:
    """Wraps ``function`` so that its thread holds `LOCK` while it runs."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _a_fork_waits:
            time.sleep(1e-3)  # locks are not fair: lets other threads in
        # On one line, so that no interruption comes between the call and the release.
        with LOCK: return function(*args, **kwargs)  # fmt: skip  # noqa: E701

    return wrapper  # type: ignore[return-value]


def eventually(function: Callable[_P, None]) -> Callable[_P, None]:
    """Runs ``function`` as `exclusive` does, or later in a separate thread if `LOCK` stays taken.

    For calls during an import or a compilation: the thread that holds `LOCK` may wait for their locks.
    """

    @functools.wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> None:
        taken: list[bool] = []
        try:
            # In C from the call on to the list, so that no signal comes between.
            taken.extend(map(LOCK.acquire, [True], [_PATIENCE_S]))
            if taken[0]:
                function(*args, **kwargs)
                return
        finally:
            if taken and taken[0]:
                LOCK.release()
        later = exclusive(function)
        threading.Thread(target=later, args=args, kwargs=kwargs, daemon=True).start()

    return wrapper


class Registry(Generic[_T]):
    """A value that users change, and functions to call after each change.

    Attributes:
        value: The value; replaced, never modified.
    """

    def __init__(self, value: _T) -> None:
        """Starts with ``value``."""
        self.value = value
        self._followers: tuple[Callable[[], None], ...] = ()

    def followed_by(self, follower: Callable[[], None]) -> None:
        """Calls ``follower`` after each change from now on; an error that it raises undoes the change."""
        self._followers = (*self._followers, follower)

    def change(self, value: _T) -> None:
        """Replaces the value."""
        change_together((self, value))


@exclusive
def change_together(*changes: tuple[Registry[Any], Any]) -> None:
    """Replaces the values of registries together and calls their followers, or changes nothing.

    Args:
        changes: Pairs of a registry and its new value.
    """
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
