"""The running modules and their names, for rules, the log and observers.

Without overhead until `module_patches` are installed. Names are those of the outermost module's
``named_modules``, without the additions of wrappers such as DDP and torch.compile.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeVar

import torch
import torch.fx.traceback
from torch import nn

from ..patching import Draft, ItemPatch, Patch
from ..places import Place, is_ours, with_callers
from ..torch_internals import (
    FX_MODULE_CALL,
    FX_TRACING,
    MODULE_HOOKS,
    Later,
    has_fake_tensors,
    leave_to_callees,
)
from .module_names import names_change, place_in, serial_of, unwrapped
from .traced_modules import (
    EXPORT_ROOT,
    is_compiled,
    may_be_compiled,
    traced_modules,
    traced_place,
)

_F = TypeVar("_F", bound=Callable[..., Any])
_MODULE_CALL: Final = nn.Module._call_impl.__code__


class _Modules(list[nn.Module]):
    """The running modules, outermost first.

    Attributes:
        place: The place of the innermost one, once it was read.
    """

    __slots__ = ("place",)  # read on every call; attributes of `_Running` are much slower
    place: Place | None

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        super().__init__(modules)
        self.place = None


class _Running(threading.local):
    """The state of a thread.

    Attributes:
        modules: The running modules.
        since: The `_noting` whose patches have recorded all running calls.
    """

    def __init__(self) -> None:
        self.modules = _Modules()
        self.since: object = None

    @property
    def key(self) -> str:
        """The value that graphs compiled here depend on: the place of their call."""
        return repr(place_in(_running_modules()))

    @property
    def root(self) -> int:
        """Identifies the outermost running module; 0 without any."""
        modules = _running_modules()
        return serial_of(unwrapped(modules[0])) if modules else 0


_running: Final = _Running()
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling

#: Identifies the installed patches; None without any. Running calls may have begun before them.
_noting: object | None = None


def _nothing() -> None:
    pass


#: Installs the patches.
_ask: Callable[[], None] = _nothing


def place() -> Place:
    """Returns the place of the current call in the model.

    Installs `module_patches` on first use, through the callback given to `asked_by`.
    """
    if _noting is None:
        _ask()
    if may_be_compiled() and has_fake_tensors() and is_compiled():
        return traced_place(_running_modules(), _running)
    running = _running.modules
    found = running.place
    if found is None:
        if not running:
            return place_in(_running_modules())
        found = running.place = place_in(running)
    return found


def spot() -> tuple[nn.Module | None, str]:
    """Returns the outermost running module, None outside of any, and the path of `place`.

    Paths are relative to the outermost module: two models of one kind have the same paths.
    """
    if _noting is None:
        _ask()
    if may_be_compiled() and has_fake_tensors() and is_compiled():
        modules = traced_modules(_running_modules(), _running)
        return (unwrapped(modules[0]), place_in(modules).path) if modules else (None, "")
    modules = _running_modules()
    return (unwrapped(modules[0]), place().path) if modules else (None, "")


def running_module() -> nn.Module | None:
    """Returns the innermost running module, once the patches are installed."""
    return _running.modules[-1] if _running.modules else None


def _running_modules() -> list[nn.Module]:
    """Returns the running modules, outermost first."""
    return _running.modules or ([] if _running.since is _noting else _running_frames())


def module_patches(draft: Draft, first_call_ended: Callable[[nn.Module], None]) -> Iterator[Patch]:
    """Yields the patches that record running modules."""
    has_ended = False
    without_parameters: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    call = draft.attribute(nn.Module, "__call__")

    @functools.wraps(call)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _is_dynamo_compiling():
            return call(self, *args, **kwargs)
        running = _running.modules
        if not running:
            return call_outermost(self, running, args, kwargs)
        outer = running.place
        running.append(self)
        running.place = None
        try:
            return call(self, *args, **kwargs)
        finally:
            running.pop()
            running.place = outer

    def call_outermost(module: nn.Module, running: _Modules, args: Any, kwargs: Any) -> Any:
        nonlocal has_ended
        began = _noting
        if _running.since is not began:
            running.extend(_running_frames())  # for calls that began before the patch
            if not running:
                _running.since = began
        running.append(module)
        running.place = None
        try:
            result = call(module, *args, **kwargs)
        finally:
            running.clear()
            running.place = None
        if not has_ended and module not in without_parameters:
            if next(module.parameters(), None) is None:
                without_parameters.add(module)
            else:
                has_ended = True
                first_call_ended(module)
        return result

    @functools.wraps(call)
    def traced(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if EXPORT_ROOT in self._modules:
            return call(self, *args, **kwargs)
        running = _running.modules
        outer = running.place
        stand_in: Any = self
        running.append(stand_in.get_base() if hasattr(type(self), "get_base") else self)
        running.place = None
        try:
            return call(self, *args, **kwargs)
        finally:
            running.pop()
            running.place = outer

    leave_to_callees(wrapper)
    leave_to_callees(call_outermost)
    yield Patch(sys.modules[__name__], "_noting", object())
    yield Patch(nn.Module, "__call__", wrapper)
    # make_fx and torch.export patch this too, on top, and call this one; some of the modules that it
    # gets are their stand-ins for the model's.
    yield Patch(FX_TRACING, FX_MODULE_CALL, traced)
    yield ItemPatch(MODULE_HOOKS, "hmpx", names_change)


def asked_by(put_in_place: Callable[[], None]) -> Patch:
    """Returns the patch that calls ``put_in_place`` when a place is read without the patches."""
    return Patch(sys.modules[__name__], "_ask", put_in_place)


def forget_modules() -> None:
    """Drops recorded modules after a change of the patches."""
    _running.modules.place = None
    for name in Later.DYNAMO_MODULE_CALLS:
        dynamo = vars(sys.modules.get(name, types))
        noted: Any = dynamo.get("unpatched_nn_module_call")  # the value at its import
        call = noted
        while is_ours(getattr(call, "__globals__", {}).get("__package__")):
            call = call.__wrapped__
        if call is not noted:
            dynamo["unpatched_nn_module_call"] = call


def keeps_place(function: _F) -> _F:
    """Makes ``function`` run as if inside the currently running modules.

    For functions that are called later, such as by a checkpoint's recomputation.
    """
    kept = list(_running_modules())
    if not kept:
        return function

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        there = _running.modules
        _running.modules = _Modules(kept)
        try:
            return function(*args, **kwargs)
        finally:
            _running.modules = there

    return wrapper  # type: ignore[return-value]


def _running_frames() -> list[nn.Module]:
    """Returns the modules with a call on the stack, outermost first."""
    found = [f.f_locals["self"] for f in with_callers(sys._getframe(1)) if f.f_code is _MODULE_CALL]
    return found[::-1]
