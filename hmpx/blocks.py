"""Blocks that a signal can't leave half: what an ``__exit__`` does is done wherever the signal comes.

Python runs signal handlers where a function of Python begins, so also between the call of an ``__exit__``
and its first line. `ends_surely` gives ``with`` a C function instead. It resumes a generator, in which the
handler's exception finds a ``try`` around it.
"""

from __future__ import annotations

import functools
import operator
import threading
import weakref
from collections.abc import Callable, Generator
from typing import Any


class ends_surely:  # noqa: N801  # a decorator
    """Makes ``with`` end a block also where a signal comes right before its ``__exit__``, or within.

    The decorated ``__exit__`` is for calls by hand, and for torch.compile, which traces it. It must do
    the same as ``end(find(instance))``.
    """

    def __init__(self, find: Callable[[Any], Any], end: Callable[[Any], object]) -> None:
        """Takes two functions of Python.

        Args:
            find: Finds the block that an instance has begun last; changes nothing.
            end: Ends that block. If an exception interrupts it, it runs again, and completes what is left.
        """
        self._find, self._end = find, end
        self._by_hand: Callable[..., object] = end

    def __call__(self, by_hand: Callable[..., object]) -> ends_surely:
        """Takes the ``__exit__``."""
        functools.update_wrapper(self, by_hand)
        self._by_hand = by_hand
        return self

    def __get__(self, instance: Any, owner: type | None = None) -> Callable[..., Any]:
        """Returns what a ``with`` calls at its end; ``with`` asks before it calls ``__enter__``."""
        if instance is None:
            return self._by_hand
        leave = _at_end(instance, self._find, self._end)
        leave.__func__ = self._by_hand  # type: ignore[attr-defined]  # for torch.compile
        return leave


class Entrance(threading.local):
    """What ``with`` calls of an object that is in effect, and kept alive, before its block begins.

    Each thread has its own, so that two can leave at a time.

    Attributes:
        enter: Returns the object.
        leave: Ends a block.
    """

    def __init__(self, owner: weakref.ref[Any]) -> None:
        """Takes the object, whose ``_begin_block()`` and ``_end_block([itself])`` are called."""
        self._owner = owner
        self.renew()

    def renew(self) -> None:
        """Makes both functions work again, which don't after a signal that came amid them."""
        beginning = _beginning(self._owner)
        next(beginning)
        self.enter = functools.partial(next, beginning)
        self.leave = _at_end(self._owner, _block_of, _end_block)


class entered(property):  # noqa: N801
    """An ``__enter__`` or ``__exit__`` that an `Entrance` has: ``entered("entrance.enter")``."""

    def __init__(self, path: str) -> None:
        """Takes the attributes that lead there, without a function of Python on the way."""
        super().__init__(operator.attrgetter(path))

    def __call__(self, instance: Any, *args: Any) -> Any:
        """Calls it by way of the class, as `contextlib.ExitStack` does."""
        assert self.fget is not None
        return self.fget(instance)(*args)


def _beginning(owner: Callable[[], Any]) -> Generator[Any, None, None]:
    try:
        while True:
            yield owner()
            owner()._begin_block()
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
        owner._end_block(block)


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
