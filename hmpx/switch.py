"""The off switch: `disable_casts`, per thread and task, and the state that follows a computation.

Every wrapper's globals are this module's, so that asking `_looks_closer` is one lookup. Knows
neither ops nor dtypes.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import os
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame

_F = TypeVar("_F", bound=Callable[..., Any])

#: Whether casts may be off in some thread, or torch.autocast on. While False, calls don't ask.
_looks_closer = False
_off_regions = 0  # regions with casts off that are open, in all threads together
_has_traced_regions = False  # torch.compile has put one into a graph: it may run at any time
_autocast_regions = 0  # regions of torch.autocast that are open
_off_regions_lock = threading.Lock()
#: Depth of such regions in this thread, or asyncio task.
_off_depth: contextvars.ContextVar[int] = contextvars.ContextVar("hmpx_off_depth", default=0)
_thread = threading.local()  # .regions: those opened by code of this thread

# The state is marked in a place that torch itself carries along as well: the autocast bit of a
# device type that nobody has. torch.compile guards on it and captures it, and autograd's backward
# threads inherit it, as they do neither thread-locals nor context variables.
_MARK = "maia"


def _mark(is_off: bool) -> None:
    torch.set_autocast_enabled(_MARK, is_off)


def _is_marked() -> bool:
    return torch.is_autocast_enabled(_MARK)


class disable_casts:  # noqa: N801  # HMP's name; a context manager, like torch.no_grad
    """Switches casting off for a block, or for the calls of a decorated function.

    Holds for the current thread or asyncio task, nests, and restores the previous state however
    the block is left. As a decorator it takes functions, generators and coroutines.

    Example:
        >>> with hmpx.disable_casts():
        ...     optimizer.step()
    """

    def __enter__(self) -> None:
        if torch.compiler.is_dynamo_compiling():
            # torch.compile runs wrappers, it does not trace into them: they see the mark, which
            # becomes part of the graph.
            _note_traced_region()
            self._was_marked = _is_marked()
            _mark(True)
        else:
            _set_depth(_off_depth.get() + 1, regions=+1)

    def __exit__(self, *exc_info: object) -> None:
        if torch.compiler.is_dynamo_compiling():
            _mark(self._was_marked)
        else:
            _set_depth(_off_depth.get() - 1, regions=-1)

    def __call__(self, function: _F) -> _F:
        """Returns ``function`` with casts off while it runs."""
        if inspect.isasyncgenfunction(function):
            raise TypeError(
                f"disable_casts can't decorate the async generator {function.__qualname__}; "
                "use `with disable_casts():` inside it"
            )
        wrapper: Any
        if asyncio.iscoroutinefunction(function):

            @functools.wraps(function)
            async def wrapper(*args: Any, **kwargs: Any) -> Any:
                with disable_casts():
                    return await function(*args, **kwargs)

        elif inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                return (yield from _run_generator(function(*args, **kwargs)))

        else:

            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                with disable_casts():
                    return function(*args, **kwargs)

        return wrapper  # type: ignore[no-any-return]


def is_off() -> bool:
    """Whether casts are off in this thread."""
    if torch.compiler.is_dynamo_compiling():
        return _is_marked()
    if _off_depth.get():
        return True
    # A mark that no code of this thread has set comes from a compiled graph, or is inherited by a
    # backward thread. Otherwise it is that of another asyncio task.
    return _is_marked() and not getattr(_thread, "regions", 0)


def keeps_state(function: _F) -> _F:
    """Returns ``function`` such that it runs with casts on or off as they are here and now.

    What runs it later may have switched them: a checkpoint's recomputation, an optimizer.
    """
    depth = _off_depth.get()

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        there = _off_depth.get()
        _set_depth(depth, regions=+1)
        try:
            return function(*args, **kwargs)
        finally:
            _set_depth(there, regions=-1)

    return wrapper  # type: ignore[return-value]


def _set_depth(depth: int, regions: int) -> None:
    """Sets the depth of this thread or task; ``regions`` is +1 where a region begins, else -1."""
    global _off_regions
    _off_depth.set(depth)
    _thread.regions = getattr(_thread, "regions", 0) + regions
    _mark(depth > 0)
    with _off_regions_lock:
        _off_regions += regions
        _set_gate()


def _start_in_forked_child() -> None:
    """Leaves behind the regions and the lock of threads that the child does not have."""
    global _off_regions, _off_regions_lock
    _off_regions_lock = threading.Lock()
    _off_regions = getattr(_thread, "regions", 0)
    _set_gate()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_in_forked_child)


def _set_gate() -> None:
    global _looks_closer
    _looks_closer = _off_regions > 0 or _autocast_regions > 0 or _has_traced_regions


def count_autocast(regions: int) -> None:
    """Notes that a region of torch.autocast begins, +1, or ends, -1."""
    global _autocast_regions
    with _off_regions_lock:
        _autocast_regions = max(0, _autocast_regions + regions)
        _set_gate()


def _note_traced_region() -> None:
    global _has_traced_regions
    with _off_regions_lock:
        _has_traced_regions = True
        _set_gate()


def run_when_traced(function: Callable[..., Any]) -> None:
    """Makes torch.compile run ``function`` at trace time, once, instead of tracing into it."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


run_when_traced(_note_traced_region)


def _run_generator(generator: Any) -> Any:
    """Runs ``generator`` with casts off inside it only, not in the code between its yields."""
    resume, value = generator.send, None
    while True:
        try:
            with disable_casts():
                yielded = resume(value)
        except StopIteration as stop:
            return stop.value
        try:
            value, resume = (yield yielded), generator.send
        except GeneratorExit:
            with disable_casts():
                generator.close()
            raise
        except BaseException as error:
            value, resume = error, generator.throw


def leave_to_callees(function: Any) -> None:
    """Has torch.compile begin its graphs in what ``function`` calls, as with Module's own functions.

    For code that all modules share: torch.compile compiles one code a few times only. Where it comes
    upon ``function`` inside of a graph, it traces on.
    """
    code = function.__code__
    if hasattr(eval_frame, "skip_code"):
        eval_frame.skip_code(code)
    elif hasattr(eval_frame, "set_code_exec_strategy"):
        action = eval_frame._FrameAction
        strategy = eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
        eval_frame.set_code_exec_strategy(code, strategy)


# Below the dispatcher (a decomposition, a meta function, a kernel written in Python) the call's
# dtypes were settled above it. This private test is exact; it is present since torch 2.0.
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_SNAPSHOT = torch._C.DispatchKey.PythonTLSSnapshot
# But for the decompositions that stand in for composite kernels while AOTAutograd and torch.export
# trace: their state is that of the user's own calls. Only where they are written tells them apart.
_is_included = torch._C._dispatch_tls_is_dispatch_key_included
_PYTHON = torch._C.DispatchKey.PythonDispatcher
_KERNELS = ("torch._decomp", "torch._refs", "torch._prims")
_BETWEEN = ("hmpx", "torch.functional", "torch.nn.functional", "torch._tensor", "torch._jit")


def is_below_dispatcher() -> bool:
    """Whether torch itself calls, where nothing is cast."""
    return _is_excluded(_SNAPSHOT) or (_is_included(_PYTHON) and _is_called_by_kernel())


def _is_called_by_kernel() -> bool:
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.startswith(_KERNELS):
            return True
        if not module.startswith(_BETWEEN) and frame.f_globals is not globals():
            return False
        frame = frame.f_back
    return False


run_when_traced(is_below_dispatcher)
