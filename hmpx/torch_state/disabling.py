"""`disable_casts`, and other blocks that switch casts on or off; the phase of a call, and whether it counts as training.

For the latter it is not enough to check whether gradients are recorded. The forward of a `torch.autograd.Function`
records none, but its backward may rerun the same calls and record them, as a reentrant checkpoint
does. Both runs of a call must use the same kernels.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import torch

from ..torch_internals import (
    OFF_MARK,
    TRAINING_MARK,
    DisableAutocast,
    current_graph_task,
    disable_modes,
    dispatch_modes,
    is_any_autocast_enabled,
)
from .switch import (
    ALL,
    ON,
    TO_LOW,
    Region,
    close_region,
    innermost,
    is_enabled,
    last_region,
    note_traced_region,
    off,
    open_region,
    set_enabled,
)

_F = TypeVar("_F", bound=Callable[..., Any])


class disable_casts:  # noqa: N801  # HMP's name; a context manager, like torch.no_grad
    """Switches casts off for a block, or for the calls of a decorated function.

    Applies to the current thread or asyncio task, and to tasks created inside the block while it is
    open. Nests, and always restores the previous state. As a decorator, with or without ``()``, it accepts
    functions, coroutines and generators, also asynchronous ones, whose callers keep their casts between yields.

    Example:
        >>> x = torch.ones(2, 2)
        >>> with hmpx.convert(device_types={"cpu"}):
        ...     (x @ x).dtype
        ...     with hmpx.disable_casts():
        ...         (x @ x).dtype
        torch.bfloat16
        torch.float32
    """

    if not TYPE_CHECKING:

        def __new__(cls, function=None):
            """Returns the block; for ``@disable_casts`` the decorated function."""
            block = super().__new__(cls)
            return block if function is None else block(function)

    def __enter__(self) -> None:
        if torch.compiler.is_dynamo_compiling():
            # torch.compile runs wrappers instead of tracing into them: they read the mark, which
            # becomes part of the graph.
            note_traced_region()
            self._was_marked = is_enabled(OFF_MARK)
            set_enabled(OFF_MARK, True)
        else:
            open_region(Region(weakref.ref(self), more=ALL))

    def __exit__(self, *exc_info: object) -> None:
        if torch.compiler.is_dynamo_compiling():
            set_enabled(OFF_MARK, self._was_marked)
        else:
            close_region(last_region(self))

    def __call__(self, function: _F) -> _F:
        """Returns ``function`` with casts off while it runs."""
        wrapper: Any
        region = type(self)
        if inspect.isasyncgenfunction(function):

            @functools.wraps(function)
            async def wrapper(*args: Any, **kwargs: Any) -> Any:
                generator = function(*args, **kwargs)
                resume, value = generator.asend, None
                while True:  # as `_run_generator`
                    try:
                        with region():
                            yielded = await resume(value)
                    except StopAsyncIteration:
                        return
                    try:
                        value, resume = (yield yielded), generator.asend
                    except BaseException as error:
                        value, resume = error, generator.athrow

        elif asyncio.iscoroutinefunction(function):

            @functools.wraps(function)
            async def wrapper(*args: Any, **kwargs: Any) -> Any:
                with region():
                    return await function(*args, **kwargs)

        elif inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                return (yield from _run_generator(region, function(*args, **kwargs)))

        else:

            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                with region():
                    return function(*args, **kwargs)

        return wrapper  # type: ignore[no-any-return]


class without_casts(disable_casts):  # noqa: N801
    """`disable_casts` for code of hmpx and of torch's optimizers, hidden from observers."""


def apart() -> contextlib.AbstractContextManager[None]:
    """Isolates hmpx's own code: not cast, observed, recorded, or seen by the program's modes."""
    is_uncast = unobserved_by() is without_casts and not is_any_autocast_enabled()
    is_apart = is_uncast and not (torch.is_grad_enabled() or dispatch_modes())
    return contextlib.nullcontext() if is_apart else _apart()


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    is_autocast_on = is_any_autocast_enabled()
    # Outermost, since its end also restores the switch's marks.
    without_autocast = DisableAutocast() if is_autocast_on else contextlib.nullcontext()
    without_modes = disable_modes() if dispatch_modes() else contextlib.nullcontext()
    with without_autocast, without_casts(), torch.no_grad(), without_modes:
        yield


def unobserved_by() -> type | None:
    """Returns the class of the innermost region if that makes a call hmpx's own; None for others."""
    region = None if torch.compiler.is_dynamo_compiling() else innermost()
    is_own = region is not None and region.kind in (without_casts, unobserved_casts)
    return region.kind if region is not None and is_own else None


def is_off_by_program() -> bool:
    """Whether the program itself has switched off the casts that are off."""
    region = innermost()
    while region is not None and not issubclass(region.kind, _State):
        if issubclass(region.kind, without_casts):
            return False
        region = region.outer
    return True


def _run_generator(region: type[disable_casts], generator: Any) -> Any:
    """Runs ``generator`` with casts off only inside it, not in the code between its yields."""
    resume, value = generator.send, None
    while True:
        try:
            with region():
                yielded = resume(value)
        except StopIteration as stop:
            return stop.value
        try:
            value, resume = (yield yielded), generator.send
        except BaseException as error:  # also GeneratorExit, by `close`
            value, resume = error, generator.throw


class _State:
    """A context in which exactly the casts in ``off`` are off."""

    def __init__(self, off: frozenset[str]) -> None:
        self._region = Region(weakref.ref(self), off=off)

    def __enter__(self) -> None:
        open_region(self._region)

    def __exit__(self, *exc_info: object) -> None:
        close_region(self._region)


class unobserved_casts(_State):  # noqa: N801
    """Switches casts on for calls that hmpx repeats, hidden from observers."""

    def __init__(self) -> None:
        super().__init__(ON)


def without_low_casts() -> _State:
    """Returns a context without casts to low precision: ops compute in it only if all inputs have it."""
    return _State(off() | {TO_LOW})


def keeps_state(function: _F) -> _F:
    """Makes ``function`` run with the current casts on or off.

    For functions that are called later, when casts may have been switched, by a checkpoint's recomputation
    or an optimizer.
    """
    state = off()

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with _State(state):
            return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


# --- the phase of a call, and whether it counts as training -------------------------------------

Phase = Literal["forward", "recompute", "backward"]


class _PhaseState(threading.local):
    """The state of a thread."""

    is_recomputing = False  # a checkpoint reruns its function
    is_training = False  # calls count as training, whether or not gradients are recorded


_here: Final = _PhaseState()
_was_marked = False  # ever, in any thread: enables the checks
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling


def phase() -> Phase:
    """Returns the phase of a call.

    ``"recompute"`` when a checkpoint reruns its forward; ``"backward"`` in other Python code that
    autograd's engine calls, in `torch.autograd.Function` and hooks.
    """
    if _here.is_recomputing:
        return "recompute"
    return "forward" if current_graph_task() == -1 else "backward"


def as_recomputation(function: _F, *, after_first: bool) -> _F:
    is_forward = after_first

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_forward
        before = _here.is_recomputing
        try:
            _here.is_recomputing = before or not is_forward
            is_forward = False
            return function(*args, **kwargs)
        finally:
            _here.is_recomputing = before

    return wrapper  # type: ignore[return-value]


def is_training() -> bool:
    """Whether a call counts as training.

    It does if gradients are recorded, and in code that may rerun to compute gradients. Whether an
    input requires a gradient does not matter: intermediate results of a checkpoint's forward don't
    show that.
    """
    return torch.is_grad_enabled() or (_was_marked and _is_marked())


def _is_marked() -> bool:
    """Whether training is marked in this thread, or in the bit on which torch.compile guards."""
    return torch.is_autocast_enabled(TRAINING_MARK) if _is_dynamo_compiling() else _here.is_training


def as_training(function: _F) -> _F:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        global _was_marked
        _was_marked = True
        before, was_marked = _here.is_training, torch.is_autocast_enabled(TRAINING_MARK)
        try:
            _here.is_training = True
            torch.set_autocast_enabled(TRAINING_MARK, True)
            return function(*args, **kwargs)
        finally:
            _here.is_training = before
            torch.set_autocast_enabled(TRAINING_MARK, was_marked)

    return wrapper  # type: ignore[return-value]


def keeps_kind(function: _F) -> _F:
    """Makes ``function`` run as training if it currently would.

    For functions that are called later, such as by a checkpoint's recomputation.
    """
    return as_training(function) if is_training() else function
