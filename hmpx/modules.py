"""Which modules are running, and what they are called: asked for by rules, the log and observers.

Costs nothing until `patches` are in place. Names are those of the outermost module's
``named_modules``, without what wrappers such as DDP and torch.compile put in front. Knows neither
ops nor policies.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final, NamedTuple, TypeVar

import torch
import torch.fx.traceback
import torch.nn.modules.module
from torch import nn

from .patching import ItemPatch, Patch

_F = TypeVar("_F", bound=Callable[..., Any])
_MODULE_CALL: Final = nn.Module._call_impl.__code__


class Place(NamedTuple):
    """Where in a model an op is called.

    Attributes:
        path: Qualified name of the innermost running module; ``""`` in the outermost, and outside.
        classes: Class names of the running modules, the outermost first.
        training: Whether the innermost is in training mode; None outside of any.
    """

    path: str = ""
    classes: tuple[str, ...] = ()
    training: bool | None = None


_OUTSIDE: Final = Place()


class _Running(threading.local):
    """What runs in a thread.

    Attributes:
        modules: Those whose call is running, outermost first.
        place: That of their innermost, once it was asked for.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.place: Place | None = None


_running: Final = _Running()


def place() -> Place:
    """Returns where the call that is being made comes from.

    Has `patches` put in place, if they are not, by whom `when_asked` says.
    """
    if _is_traced():
        return _traced_place(_running.modules)
    if not _is_noting:
        _ask()
    known = _running.place
    if known is not None:
        return known
    if _may_be_midway and not _running.modules:
        return _place_in(_running_frames())
    found = _running.place = _place_in(_running.modules)
    return found


def _place_in(running: list[nn.Module]) -> Place:
    if not running:
        return _OUTSIDE
    classes = tuple([type(module).__name__ for module in running])
    return Place(_path(running), classes, running[-1].training)


def patches(first_call_ended: Callable[[nn.Module], None]) -> Iterator[Patch | ItemPatch]:
    """Yields the patches that note running modules.

    Args:
        first_call_ended: Is told the first outermost module whose call has ended.
    """
    global _is_noting, _may_be_midway
    _is_noting = _may_be_midway = True
    has_ended = False
    call = nn.Module.__call__

    @functools.wraps(call)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            if self.training:  # asked, it becomes a guard of the compiled code
                return call(self, *args, **kwargs)
            return call(self, *args, **kwargs)
        running = _running.modules
        if not running:
            return call_outermost(self, running, args, kwargs)
        outer = _running.place
        running.append(self)
        _running.place = None
        try:
            return call(self, *args, **kwargs)
        finally:
            running.pop()
            _running.place = outer

    def call_outermost(module: nn.Module, running: list[nn.Module], args: Any, kwargs: Any) -> Any:
        nonlocal has_ended
        if _may_be_midway:
            running.extend(_running_frames())  # of calls that began before the patch
            if not running:
                _leave_midway()
        running.append(module)
        _running.place = None
        try:
            result = call(module, *args, **kwargs)
        finally:
            running.clear()
            _running.place = None
        if not has_ended:
            has_ended = True
            first_call_ended(module)
        return result

    yield Patch(nn.Module, "__call__", wrapper)
    hooks = torch.nn.modules.module._global_module_registration_hooks
    yield ItemPatch(hooks, "hmpx", _names_change)


#: The patches are in place.
_is_noting = False
#: Calls of modules may be running that began before the patches were in place.
_may_be_midway = True


def when_asked(put_in_place: Callable[[], None]) -> None:
    """Has ``put_in_place`` called when a place is asked for while no `patches` are in place."""
    global _ask
    _ask = put_in_place


def _ask() -> None:
    pass


def forget() -> None:
    """Notes that the patches are no longer in place."""
    global _is_noting, _may_be_midway
    _is_noting, _may_be_midway = False, True
    _running.place = None


def _leave_midway() -> None:
    global _may_be_midway
    _may_be_midway = False


def keeps_place(function: _F) -> _F:
    """Returns ``function`` such that it runs as if inside of the modules that are running now.

    For what runs it later: a checkpoint's recomputation.
    """
    if not _running.modules:
        return function
    kept = list(_running.modules)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        there = _running.modules, _running.place
        _running.modules, _running.place = list(kept), None
        try:
            return function(*args, **kwargs)
        finally:
            _running.modules, _running.place = there

    return wrapper  # type: ignore[return-value]


# --- names -------------------------------------------------------------------------------------

#: Module -> id of a module in it -> that module, to be sure, and its name.
_names_of: weakref.WeakKeyDictionary[nn.Module, dict[int, tuple[weakref.ref[nn.Module], str]]]
_names_of = weakref.WeakKeyDictionary()

#: Modules that hold the user's one under a name: class name -> that name.
_AROUND: Final = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
}
_WRAPPED: Final = re.compile(
    r"(?:^|\.)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)"
)


def named_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules in ``root``, each with the first of the names by which it goes."""
    prefix, inner = "", root
    while (name := _AROUND.get(type(inner).__name__)) is not None and hasattr(inner, name):
        yield "", inner
        prefix, inner = f"{prefix}{name}.", getattr(inner, name)
    for name, module in inner.named_modules():
        yield _WRAPPED.sub("", name).removeprefix("."), module


def _path(running: list[nn.Module]) -> str:
    root, module = running[0], running[-1]
    if root is module:
        return ""
    for is_again in (False, True):
        known = _names_of.get(root)
        if known is None or is_again:
            known = _names_of[root] = {
                id(each): (weakref.ref(each), name) for name, each in named_modules(root)
            }
        found = known.get(id(module))
        if found is not None and found[0]() is module:
            return found[1]
    return type(module).__name__  # it is not registered


def _names_change(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    _names_of.clear()


# --- frames, and graphs that are being traced --------------------------------------------------


def _running_frames() -> list[nn.Module]:
    """Returns the modules whose call is on the stack, outermost first."""
    found = [f.f_locals["self"] for f in _frames(sys._getframe(1)) if f.f_code is _MODULE_CALL]
    return found[::-1]


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


_dispatch_mode = torch._C._get_dispatch_mode
_FAKE = torch._C._TorchDispatchModeKey.FAKE

#: Modules that torch.compile has traced into: its graphs know them by their ids.
_traced: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()


def _is_traced() -> bool:
    """Whether torch.compile makes a graph, in which no module's call is running."""
    return "torch._dynamo.symbolic_convert" in sys.modules and _dispatch_mode(_FAKE) is not None


def _traced_place(running: list[nn.Module]) -> Place:
    """Returns the place that torch.compile has noted: for this node of its graph, or as it traces.

    ``running`` are the modules from whose call it was set off.
    """
    stack = torch.fx.traceback.get_current_meta().get("nn_module_stack")
    if stack is None:
        stack = _dynamo_stack()
    entries = list((stack or {}).items())
    around = _place_in(running)
    if not entries:
        return around
    key, (name, _) = entries[-1]
    base = _base_name(entries[0][1][0], has_root=bool(running))
    inner = _WRAPPED.sub("", name.removeprefix(base)).removeprefix(".")
    module = _traced.get(int(str(key).partition("@")[0]))
    return Place(
        ".".join(filter(None, (around.path, inner))),
        (*around.classes, *[each.__name__ for _, (_, each) in entries]),
        None if module is None else module.training,
    )


def _base_name(first: str, *, has_root: bool) -> str:
    """Returns what stands for the outermost module in names such as ``L['self'].layers.0``."""
    variable = re.match(r"[LG]\['[^']*'\]", first)
    return variable.group() if has_root and variable else first


def _dynamo_stack() -> dict[str, Any] | None:
    """Returns the modules that torch.compile is tracing into."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    innermost: dict[str, Any] | None = None
    for frame in _frames(sys._getframe(1)):
        translator = frame.f_locals.get("self")
        if frame.f_code.co_name != "step" or not isinstance(translator, InstructionTranslatorBase):
            continue
        if innermost is None:
            innermost = translator.nn_module_stack
        variable = translator.symbolic_locals.get("self")
        module = getattr(variable, "value", None)
        if isinstance(module, nn.Module):
            _traced[id(module)] = module
    return innermost
