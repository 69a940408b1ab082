"""What is registered for the whole process, changed as a whole or not at all, by one thread at a time.

A registry's value is immutable: whoever read it goes on with what he read. `LOCK` is also that of
conversions, which follow each change. A fork waits for it, so that a child finds all of a change or
nothing of it.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")

#: Held while anything process-wide changes.
LOCK: Final = threading.RLock()

_a_fork_waits = False


def _before_fork() -> None:
    global _a_fork_waits
    _a_fork_waits = True
    LOCK.acquire()
    _a_fork_waits = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=LOCK.release, after_in_child=LOCK.release
    )


def exclusive(function: _F) -> _F:
    """Returns ``function`` such that it runs while its thread holds `LOCK`."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _a_fork_waits:
            time.sleep(1e-3)  # locks are not fair: a thread that changes things in a loop gives way
        # One line, so that no line comes between the call and the release.
        with LOCK: return function(*args, **kwargs)  # fmt: skip  # noqa: E701

    return wrapper  # type: ignore[return-value]


class Registry(Generic[_T]):
    """A value that users change, and what follows it.

    Attributes:
        value: The value; never changed itself, only replaced.
    """

    def __init__(self, value: _T) -> None:
        """Starts with ``value``."""
        self.value = value
        self._followers: tuple[Callable[[], None], ...] = ()

    def followed_by(self, follower: Callable[[], None]) -> None:
        """Has ``follower`` called after each change; an error that it raises undoes the change."""
        self._followers = (*self._followers, follower)

    def change(self, value: _T) -> None:
        """Replaces the value."""
        change_together((self, value))


@exclusive
def change_together(*changes: tuple[Registry[Any], Any]) -> None:
    """Replaces the values of registries together, and has what follows them do so, or changes nothing.

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
        for follow in followers:  # one may have followed by the time that it raised
            follow()
        raise
