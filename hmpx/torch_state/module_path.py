"""Which modules are running, and what they are called: asked for by rules, the log and observers.

Costs nothing until `patches` are in place. Names are those of the outermost module's
``named_modules``, without what wrappers such as DDP and torch.compile add to them. Knows neither
ops nor policies.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, TypeVar

import torch
import torch.fx.traceback
from torch import nn

from ..frames import is_ours
from ..patching import Draft, ItemPatch, Patch
from ..places import Place
from ..torch_internals import (
    DYNAMO_GUARDS,
    DYNAMO_MODULE_CALLS,
    DYNAMO_SOURCES,
    DYNAMO_TRANSLATION,
    DYNAMO_VARIABLES,
    FX_MODULE_CALL,
    FX_TRACING,
    MODULE_HOOKS,
    has_fake_tensors,
    leave_to_callees,
    needed_of_later,
    tracing_context,
)

_F = TypeVar("_F", bound=Callable[..., Any])
_MODULE_CALL: Final = nn.Module._call_impl.__code__


_OUTSIDE: Final = Place()


class _Running(threading.local):
    """What runs in a thread.

    Attributes:
        modules: Those whose call is running, outermost first.
        place: That of their innermost, once it was asked for.
        since: The `_noting` of which it is known that all calls have gone through its patches.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.place: Place | None = None
        self.since: object = None

    @property
    def key(self) -> str:
        """What graphs that are compiled here depend on: where they are called from."""
        return repr(_place_in(_running_modules()))


_running: Final = _Running()
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling

#: Stands for the patches that are in place, None without any. Calls may be running that began before.
_noting: object | None = None


def _nothing() -> None:
    pass


#: Puts `patches` in place.
_ask: Callable[[], None] = _nothing


def place() -> Place:
    """Returns where the call that is being made comes from.

    Has `patches` put in place, if they are not, by what `asked_by` was given.
    """
    if _noting is None:
        _ask()
    if has_fake_tensors() and _is_traced():
        return _traced_place()
    found = _running.place
    if found is None:
        running = _running.modules
        if not running:
            return _place_in(_running_modules())
        found = _running.place = _place_in(running)
    return found


@dataclass(frozen=True, slots=True)
class _Known:
    """A place that was found, and what shows that it still is that of the same modules."""

    root: weakref.ref[nn.Module]
    module: weakref.ref[nn.Module]
    keys: _Keys
    place: Place


def _place_in(running: Sequence[nn.Module]) -> Place:
    if not running:
        return _OUTSIDE
    root, module = running[0], running[-1]
    ids = tuple(map(id, running))
    known = _known.get(ids)
    if (
        known is not None
        and known.module() is module
        and known.root() is root
        and known.place.training is module.training
        and _is_at(root, known.keys, module)
    ):
        return known.place
    classes = tuple([_class_name(type(each)) for each in running])
    if _OPTIMIZED in classes and any(_optimized(each) is not None for each in running):
        return _place_in(_without_optimized(running))
    keys, path = _name(root, module)
    found = Place(path, classes, module.training)
    if keys is not None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[ids] = _Known(weakref.ref(root), weakref.ref(module), keys, found)
    return found


def _running_modules() -> list[nn.Module]:
    """Returns the modules that are running, outermost first."""
    return _running.modules or ([] if _running.since is _noting else _running_frames())


def module_patches(
    draft: Draft, first_call_ended: Callable[[nn.Module], None]
) -> Iterator[Patch | ItemPatch]:
    """Yields the patches that note running modules.

    Args:
        draft: Where torch is as it would be without these patches.
        first_call_ended: Is told the first outermost module with parameters whose call has ended.
    """
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
        began = _noting
        if _running.since is not began:
            running.extend(_running_frames())  # of calls that began before the patch
            if not running:
                _running.since = began
        running.append(module)
        _running.place = None
        try:
            result = call(module, *args, **kwargs)
        finally:
            running.clear()
            _running.place = None
        if not has_ended and module not in without_parameters:
            if next(module.parameters(), None) is None:
                without_parameters.add(module)
            else:
                has_ended = True
                first_call_ended(module)
        return result

    @functools.wraps(call)
    def traced(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _EXPORT_ROOT in self._modules:
            return call(self, *args, **kwargs)
        running, outer = _running.modules, _running.place
        stand_in: Any = self
        running.append(stand_in.get_base() if hasattr(type(self), "get_base") else self)
        _running.place = None
        try:
            return call(self, *args, **kwargs)
        finally:
            running.pop()
            _running.place = outer

    leave_to_callees(wrapper)
    leave_to_callees(call_outermost)
    yield Patch(sys.modules[__name__], "_noting", object())
    yield Patch(nn.Module, "__call__", wrapper)
    # make_fx and torch.export put theirs on top of that, which calls this; some of the modules
    # that it is called with are their stand-ins for the model's.
    yield Patch(FX_TRACING, FX_MODULE_CALL, traced)
    yield ItemPatch(MODULE_HOOKS, "hmpx", _names_change)


def asked_by(put_in_place: Callable[[], None]) -> Patch:
    """Returns the patch that has ``put_in_place`` called where a place is asked for without `patches`."""
    return Patch(sys.modules[__name__], "_ask", put_in_place)


def forget_modules() -> None:
    """Lets go of what was noted: the patches have changed."""
    _running.place = None
    for name in DYNAMO_MODULE_CALLS:
        dynamo = vars(sys.modules.get(name, types))
        noted: Any = dynamo.get("unpatched_nn_module_call")  # when it was imported
        call = noted
        while is_ours(getattr(call, "__globals__", {}).get("__package__")):
            call = call.__wrapped__
        if call is not noted:
            dynamo["unpatched_nn_module_call"] = call


def keeps_place(function: _F) -> _F:
    """Returns ``function`` such that it runs as if inside of the modules that are running now.

    For what runs it later: a checkpoint's recomputation.
    """
    kept = list(_running_modules())
    if not kept:
        return function

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

_OPTIMIZED: Final = "OptimizedModule"

#: Names under which wrappers hold the module that is meant, whatever the wrappers are called.
_INNER: Final = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
#: Class name of a wrapper -> the name under which it holds that module.
_AROUND: Final = {"DistributedDataParallel": "module", "DataParallel": "module"}
#: What torch puts in front of a class' name when it gives a module a class of its own making.
_MADE: Final = ("FSDP", "Parametrized", "Replicate")

#: Names of the modules from the outermost to this one, as it holds them.
_Keys = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Named:
    """A module as it was found in another."""

    module: weakref.ref[nn.Module]
    keys: _Keys
    path: str


#: Outermost module -> id of a module in it -> how it was found; None for one that is not in it.
_found_in: weakref.WeakKeyDictionary[nn.Module, dict[int, _Named | weakref.ref[nn.Module]]]
_found_in = weakref.WeakKeyDictionary()


#: Ids of running modules -> their innermost one's place. For all roots; for modules that come and go.
_known: dict[tuple[int, ...], _Known] = {}
_MOST_KNOWN: Final = 1 << 14


def named_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules in ``root``, each with the first of the names by which it goes."""
    for _, path, module in _walk(root, (), "", set()):
        yield path, module


def _walk(
    module: nn.Module, keys: _Keys, path: str, seen: set[int]
) -> Iterator[tuple[_Keys, str, nn.Module]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    yield keys, path, module
    around = _AROUND.get(type(module).__name__)
    for key, child in module._modules.items():
        if child is not None:
            is_inner = key in _INNER or key == around
            inner = path if is_inner else f"{path}.{key}" if path else key
            yield from _walk(child, (*keys, key), inner, seen)


def _name(root: nn.Module, module: nn.Module) -> tuple[_Keys | None, str]:
    """Returns how ``root`` holds ``module``, None if it does not, and its qualified name."""
    for is_again in (False, True):
        known = _found_in.get(root)
        if known is None or is_again:
            absent = {k: v for k, v in (known or {}).items() if type(v) is not _Named}
            present = {
                id(each): _Named(weakref.ref(each), keys, path)
                for keys, path, each in _walk(root, (), "", set())
            }
            known = _found_in[root] = {**absent, **present}
        found = known.get(id(module))
        if isinstance(found, _Named):
            if found.module() is module and _is_at(root, found.keys, module):
                return found.keys, found.path
        elif found is not None and found() is module:
            break  # it was not in the outermost one, which has not changed since
    else:
        _found_in[root][id(module)] = weakref.ref(module)
    return None, _class_name(type(module))


def _is_at(root: nn.Module, keys: _Keys, module: nn.Module) -> bool:
    """Whether ``module`` is still there: items of a ModuleList move without a word to anybody."""
    at: Any = root
    for key in keys:
        at = at._modules.get(key)
        if at is None:
            return False
    return at is module


def _names_change(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    _found_in.clear()
    _known.clear()


def _users_class_name(cls: type) -> str:
    """Returns the name of the class that the user knows, where torch has made one from it."""
    if cls.__module__.startswith("torch."):
        for base in cls.__bases__:
            if cls.__name__ in [f"{front}{base.__name__}" for front in _MADE]:
                return _users_class_name(base)
    return cls.__name__


_class_name: Callable[[Any], str] = functools.lru_cache(maxsize=1 << 12)(_users_class_name)


def _without_optimized(running: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns ``running`` with the user's module in the place of what torch.compile put around it."""
    found: list[nn.Module] = []
    for module in running:
        if found and _optimized(found[-1]) is module:
            found[-1] = module
        else:
            found.append(module)
    for position in range(len(found)):
        while (inner := _optimized(found[position])) is not None:
            found[position] = inner
    return found


def _optimized(module: nn.Module) -> nn.Module | None:
    """Returns the user's module in ``module``, None if torch.compile has not put that around one."""
    is_optimized = type(module).__name__ == _OPTIMIZED
    return module._modules.get("_orig_mod") if is_optimized else None


def _running_frames() -> list[nn.Module]:
    """Returns the modules whose call is on the stack, outermost first."""
    found = [f.f_locals["self"] for f in _frames(sys._getframe(1)) if f.f_code is _MODULE_CALL]
    return found[::-1]


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


# --- graphs that are being traced --------------------------------------------------------------

#: Modules that torch.compile has traced into: its graphs know them by their ids.
_traced: weakref.WeakValueDictionary[str, nn.Module] = weakref.WeakValueDictionary()

#: Under which name torch.export puts a model into a module of its own, and what its graphs call it.
_EXPORT_ROOT, _EXPORTED = "_export_root", "L__self__"


def _is_traced() -> bool:
    """Whether the fake tensors are those of torch.compile, in whose graphs no module's call runs."""
    return DYNAMO_TRANSLATION in sys.modules and tracing_context() is not None


def _traced_place() -> Place:
    """Returns the place that torch.compile has noted: for this node of its graph, or as it traces."""
    running = _without_optimized(_running_modules())
    meta = torch.fx.traceback.get_current_meta()
    stack = meta.get("nn_module_stack")
    translators = _translators()
    if translators:
        _guard_on_surroundings(translators[0])
        if stack is None:
            stack = translators[-1].nn_module_stack
    for key in stack or ():
        module = _traced.get(str(key).partition("@")[0])
        if module is not None and module not in running[-1:]:
            running.append(module)
    found = _place_in(running)
    if translators and not meta:
        context = translators[0].output.tracing_context
        _traced_places.setdefault(context, []).append(found)
    return found


#: Of what torch.compile is tracing -> the places that ops asked for.
_traced_places: weakref.WeakKeyDictionary[Any, list[Place]] = weakref.WeakKeyDictionary()


def traced_places() -> str:
    """Returns what stands for the places of the ops in the graph that is being compiled.

    Graphs may differ in nothing else.
    """
    context = tracing_context()
    places = None if context is None else _traced_places.get(context)
    return repr(places) if places else ""


def _translators() -> list[Any]:
    """Returns what translates the calls that torch.compile is tracing into, outermost first."""
    translator_class = needed_of_later(DYNAMO_TRANSLATION, "InstructionTranslatorBase")
    lazy = needed_of_later(DYNAMO_VARIABLES, "LazyVariableTracker")
    of_module = needed_of_later(DYNAMO_VARIABLES, "UnspecializedNNModuleVariable")
    found = []
    for frame in _frames(sys._getframe(1)):
        translator = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        if not isinstance(translator, translator_class):
            continue
        found.append(translator)
        variable: Any = translator.symbolic_locals.get(
            next(iter(translator.f_code.co_varnames), "")
        )
        if isinstance(variable, lazy) and not variable.is_realized():
            module = variable.peek_value()
        else:  # the values of others than modules may raise errors
            is_module = isinstance(variable, of_module)
            module = variable.value if is_module else None
        if isinstance(module, nn.Module):
            _guard_on(variable.realize().source, "training")
            _traced[str(id(module))] = module
            exported = module._modules.get(_EXPORT_ROOT)
            if exported is not None:
                _traced[_EXPORTED] = exported
    return found[::-1]


def _guard_on_surroundings(translator: Any) -> None:
    """Has the graph that is being traced hold only where it is called from such a place as this."""
    if torch.compiler.is_exporting():
        return
    global_source = needed_of_later(DYNAMO_SOURCES, "GlobalSource")
    name = translator.output.install_global_by_id("__hmpx_running", _running)
    _guard_on(global_source(name), "key")


def _guard_on(source: Any, attribute: str) -> None:
    """Has the graph that is being traced hold only while an attribute has the value that it has now.

    Args:
        source: Where Dynamo has the attribute's owner from; None if the graph makes it.
        attribute: Name of an attribute that is a bool or a string.
    """
    if source is None:
        return
    attribute_source = needed_of_later(DYNAMO_SOURCES, "AttrSource")
    install_guard = needed_of_later(DYNAMO_GUARDS, "install_guard")
    equals = needed_of_later(DYNAMO_GUARDS, "GuardBuilder.EQUALS_MATCH")
    install_guard(attribute_source(source, attribute).make_guard(equals))
