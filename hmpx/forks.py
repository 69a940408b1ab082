"""Locks and threads for which a fork waits: its child finds locks free, and the state that they guard whole.

A child of `os.fork` has only the thread that forked. Locks of other threads would stay taken there, their
imports would never end, and their changes would stay half made.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Final, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")

#: How long a fork waits. The thread that holds a lock may wait for the one that forks: for the end of its import.
_PATIENCE_S = 30.0

#: How often a waiting thread checks whether it is in a child, where the other thread is missing.
_POLL_S: Final = 0.05

_creation: Final = threading.RLock()  # held while a lock is made
_locks: Final = weakref.WeakValueDictionary[int, threading.RLock]()
_here: Final = threading.local()  # .held: for each fork in progress, the locks that it holds


def new_lock() -> threading.RLock:
    """Returns a lock for which forks wait. It is reentrant: a signal handler may fork in the thread that holds it.

    A fork also waits for ``with new_lock(): import ...``, and nobody else does.
    """
    lock = threading.RLock()
    with _creation:
        _locks[id(lock)] = lock
    return lock


class CachedProperty(functools.cached_property[_T]):
    """`functools.cached_property`, which has a lock before Python 3.12."""

    def __init__(self, function: Callable[[Any], _T]) -> None:
        super().__init__(function)
        self.lock = new_lock()


def holding(lock: threading.RLock) -> Callable[[_F], _F]:
    """Makes the thread of a function hold ``lock`` while it runs."""

    def decorate(function: _F) -> _F:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            # On one line, so that no signal comes between the call and the release.
            with lock: return function(*args, **kwargs)  # fmt: skip  # noqa: E701

        return wrapper  # type: ignore[return-value]

    return decorate


def in_own_thread(function: Callable[[], _T], name: str) -> _T:
    """Runs ``function`` in its own thread, and returns its result.

    torch's state is the default there, so none of the program's modes, such as inference mode, transforms or
    hooks for saved tensors, sees or changes the computation.
    """
    results: list[_T] = []
    errors: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        with new_lock():
            try:
                results.append(function())
            except BaseException as error:
                errors.append(error)
            finally:
                ended.set()

    def wait() -> None:
        # Before Python 3.13, a signal amid `join` or `is_alive` marks a running thread as ended.
        while not ended.is_set() and thread in threading.enumerate():
            ended.wait(_POLL_S)

    while not ended.is_set():  # twice if a signal handler forks before the thread has its lock
        thread = threading.Thread(target=run, name=name)
        try:
            thread.start()
            wait()
        finally:
            wait()  # again: a signal handler raised an error
    if errors:
        raise errors.pop()  # else the error and this frame would keep each other alive
    return results[0]


# --- what a fork does ----------------------------------------------------------------------------


def _all() -> list[threading.RLock]:
    return [_creation, *[lock for ref in _locks.valuerefs() if (lock := ref()) is not None]]


def _hold_all() -> None:
    """Takes all locks. While it waits for one it holds no other, so their order does not matter."""
    held: list[threading.RLock] = []
    vars(_here).setdefault("held", []).append(held)
    end, busy = time.monotonic() + _PATIENCE_S, _creation
    while True:
        is_late = not busy.acquire(timeout=max(0, end - time.monotonic()))
        if not is_late:
            held.append(busy)
        taken: list[threading.RLock] = []  # by other threads
        for lock in _all():
            (held if lock.acquire(blocking=False) else taken).append(lock)
        if is_late or not taken:
            return
        busy = taken[0]
        while held:
            held.pop().release()


def _release_all() -> None:
    for lock in _here.held.pop():
        lock.release()


def _free_all() -> None:
    taken = set(_all()).difference(_here.held[-1])
    for lock in taken:
        lock._at_fork_reinit()  # type: ignore[attr-defined]
    _release_all()
    if taken:
        logging.getLogger("hmpx").warning(
            "a process was forked while another thread was changing hmpx's state, which may be half changed "
            "in the child; call hmpx.revert() there, or start processes before that thread"
        )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold_all, after_in_parent=_release_all, after_in_child=_free_all)
