"""Blocks that a signal can't leave half: what an ``__exit__`` does is done wherever the signal comes.

Python runs signal handlers where a function of Python begins, so also between the call of an ``__exit__``
and its first line. `ends_surely` gives ``with`` a C function instead. It resumes a generator, in which the
handler's exception finds a ``try`` around it.
"""

from __future__ import annotations

import functools
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
        ending = _ending(instance, self._find, self._end)
        next(ending)
        # Calls `send` with None, and with each argument; None is returned, as the first of equals.
        leave = functools.partial(max, None, key=ending.send)
        leave.__func__ = self._by_hand  # type: ignore[attr-defined]  # for torch.compile
        return leave


def _ending(
    instance: Any, find: Callable[[Any], Any], end: Callable[[Any], object]
) -> Generator[int, object, None]:
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
    while True:
        yield 0
