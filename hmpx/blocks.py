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
    """Makes ``with`` end a block even if a signal handler raises right before or in ``__exit__``."""

    def __init__(self, find: Callable[[Any], Any] | None, end: Callable[[Any], object]) -> None:
        """Takes two Python functions.

        Args:
            find: Returns the block that an instance opened last. Has no side effect. None if the instance
                itself is the block: ``with`` then calls the decorated ``__exit__``, with the exception.
            end: Ends the block. It runs a second time, or after ``__exit__``, if an exception interrupts
                that, so it must be idempotent.
        """
        self._find = find or (lambda instance: instance)
        self._end = end
        self._leave = None if find is None else lambda block, *exc_info: end(block)
        self._by_hand: Callable[..., object] = end

    def __call__(self, by_hand: Callable[..., object]) -> ends_surely:
        """Takes the ``__exit__``, which ends the block that ``find`` returns."""
        functools.update_wrapper(self, by_hand)
        self._by_hand = by_hand
        return self

    def __get__(self, instance: Any, owner: type | None = None) -> Callable[..., Any]:
        """Returns the C function that ends the block. ``with`` fetches it before it calls ``__enter__``."""
        if instance is None:
            return self._by_hand
        leave = _at_end(instance, self._find, self._end, self._leave or self._by_hand)
        leave.__func__ = self._by_hand  # type: ignore[attr-defined]  # for torch.compile
        return leave


class Block:
    """A base class of blocks that end even if a signal handler raises in them, or right before or after."""

    def __enter__(self) -> None:
        try:
            self._begin()
        except BaseException:
            self._end()
            raise

    def _begin(self) -> None:
        pass

    def _end(self) -> None:
        """Ends the block; an interrupted call is repeated."""
        raise NotImplementedError

    @ends_surely(None, lambda block: block._end())
    def __exit__(self, *exc_info: object) -> None:
        self._end()


class surely(Block):  # noqa: N801  # a block
    """Calls a function at the end of the block, once or twice."""

    def __init__(self, end: Callable[[], object]) -> None:
        """Takes the function."""
        self._function = end

    def _end(self) -> None:
        self._function()


class hooked(Block):  # noqa: N801  # a block
    """Registers hooks with torch until the end of the block."""

    def __init__(self, *hooks: tuple[Callable[..., Any], Callable[..., Any]]) -> None:
        """Takes pairs: a function of torch that registers a hook, and the hook."""
        self._hooks = hooks
        self._handles: list[Any] = []

    def _begin(self) -> None:
        for register, hook in self._hooks:
            # In C from the call on to the list, so that no signal comes between.
            self._handles.extend(map(register, [hook]))

    def _end(self) -> None:
        for each in self._handles:
            each.remove()


class Entrance(threading.local):
    """The C functions that ``with`` calls on an object that is in force before its block begins.

    Each thread has its own pair, so two threads can leave at the same time. They keep the object alive
    only while a block is open.

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
        held: list[Any] = []

        def end(block: list[Any], *exc_info: object) -> None:
            owner = block[0]
            if owner is not None:
                owner.end_block(block)
            held.clear()

        beginning = _beginning(self._owner, held, end)
        next(beginning)
        self.enter = functools.partial(next, beginning)
        self.leave = _at_end(self._owner, _block_of, end, end)


class _InC(property):
    """A method that C code binds to the instance: Python runs no signal handler while it is looked up."""

    def __call__(self, instance: Any, *args: Any) -> Any:
        """Supports `contextlib.ExitStack`, which looks the method up on the class."""
        assert self.fget is not None
        return self.fget(instance)(*args)


class Entered:
    """A base class of context managers that take effect before their block begins.

    Attributes:
        entrance: Made for this object.
    """

    entrance: Entrance
    _enter = _InC(operator.attrgetter("entrance.enter"))
    #: Holds the object, which ``with`` does not: it might be the last reference.
    __enter__ = _InC(functools.partial(functools.partial, operator.methodcaller("_enter")))
    __exit__ = _InC(operator.attrgetter("entrance.leave"))


def _beginning(
    owner: Callable[[], Any], held: list[Any], end: Callable[[list[Any]], object]
) -> Generator[Any, None, None]:
    try:
        while True:
            yield owner()
            held.append(owner())
            owner().begin_block()
    except GeneratorExit:
        pass
    except BaseException:
        end(_block_of(owner))
        raise


def _block_of(owner: Callable[[], Any]) -> list[Any]:
    return [owner()]


def _at_end(
    instance: Any,
    find: Callable[[Any], Any],
    end: Callable[[Any], object],
    leave: Callable[..., object],
) -> functools.partial[None]:
    ending = _ending(instance, find, end, leave)
    next(ending)
    # Calls `send` with None, and with each argument. Returns None: all results are equal, and it is first.
    return functools.partial(max, None, key=ending.send)


def _ending(
    instance: Any,
    find: Callable[[Any], Any],
    end: Callable[[Any], object],
    leave: Callable[..., object],
) -> Generator[int, object, None]:
    while True:
        found: list[Any] = []
        try:
            yield 0
            found += [find(instance)]
            leave(*found, (yield 0), (yield 0), (yield 0))
        except BaseException as error:
            if isinstance(error, GeneratorExit) and not found:  # the block has never begun
                return
            end(found[0] if found else find(instance))
            raise
