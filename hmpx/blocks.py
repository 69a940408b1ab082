"""Context managers whose ``__exit__`` completes even if a signal handler raises in it.

Python runs signal handlers where a Python function begins: also between the call of an ``__exit__`` and
its first line. `ends_surely` gives ``with`` a C function instead. That function resumes a generator, whose
``try`` catches the handler's exception.
"""

from __future__ import annotations

import functools
import operator
import threading
import weakref
from collections.abc import Callable, Generator
from typing import Any


class ends_surely:  # noqa: N801  # a decorator
    """Makes ``with`` end a block even if a signal handler raises right before or in ``__exit__``.

    Direct calls, and torch.compile, use the decorated ``__exit__``. It must do the same as
    ``end(find(instance))``.
    """

    def __init__(self, find: Callable[[Any], Any], end: Callable[[Any], object]) -> None:
        """Takes two Python functions.

        Args:
            find: Returns the block that an instance opened last. Has no side effect.
            end: Ends that block. It runs a second time if an exception interrupts it, so it must be
                idempotent.
        """
        self._find, self._end = find, end
        self._by_hand: Callable[..., object] = end

    def __call__(self, by_hand: Callable[..., object]) -> ends_surely:
        """Takes the ``__exit__``."""
        functools.update_wrapper(self, by_hand)
        self._by_hand = by_hand
        return self

    def __get__(self, instance: Any, owner: type | None = None) -> Callable[..., Any]:
        """Returns the C function that ends the block. ``with`` fetches it before it calls ``__enter__``."""
        if instance is None:
            return self._by_hand
        leave = _at_end(instance, self._find, self._end)
        leave.__func__ = self._by_hand  # type: ignore[attr-defined]  # for torch.compile
        return leave


class Entrance(threading.local):
    """The C functions that ``with`` calls on an object that takes effect before its block begins.

    Each thread has its own pair, so two threads can leave at the same time.

    Attributes:
        enter: Returns the object.
        leave: Ends a block.
    """

    def __init__(self, owner: weakref.ref[Any]) -> None:
        """Takes the object. Its ``begin_block()`` and ``end_block([itself])`` are called."""
        self._owner = owner
        self.renew()

    def renew(self) -> None:
        """Replaces both functions. A signal that interrupts one makes it unusable."""
        beginning = _beginning(self._owner)
        next(beginning)
        self.enter = functools.partial(next, beginning)
        self.leave = _at_end(self._owner, _block_of, _end_block)


class entered(property):  # noqa: N801
    """Forwards ``__enter__`` or ``__exit__`` to an `Entrance`: ``entered("entrance.enter")``."""

    def __init__(self, path: str) -> None:
        """Takes the attribute path. It is looked up in C."""
        super().__init__(operator.attrgetter(path))

    def __call__(self, instance: Any, *args: Any) -> Any:
        """Supports `contextlib.ExitStack`, which looks the method up on the class."""
        assert self.fget is not None
        return self.fget(instance)(*args)


def _beginning(owner: Callable[[], Any]) -> Generator[Any, None, None]:
    try:
        while True:
            yield owner()
            owner().begin_block()
    except GeneratorExit:
        pass
    except BaseException:
        block = _block_of(owner)
        _end_block(block)
        raise


def _block_of(owner: Callable[[], Any]) -> list[Any]:
    return [owner()]


def _end_block(block: list[Any]) -> None:
    owner = block[0]
    if owner is not None:
        owner.end_block(block)


def _at_end(
    instance: Any, find: Callable[[Any], Any], end: Callable[[Any], object]
) -> functools.partial[None]:
    ending = _ending(instance, find, end)
    next(ending)
    # Calls `send` with None, and with each argument; None is returned, as the first of equals.
    return functools.partial(max, None, key=ending.send)


def _ending(
    instance: Any, find: Callable[[Any], Any], end: Callable[[Any], object]
) -> Generator[int, object, None]:
    while True:
        try:
            yield 0
            block = find(instance)
        except GeneratorExit:  # the block has never begun
            return
        except BaseException:
            end(find(instance))
            raise
        try:
            end(block)
        except BaseException:
            end(block)
            raise
        del block
        yield 0
        yield 0
        yield 0
