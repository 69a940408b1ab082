"""The running modules and their names, for rules, the log and observers.

Without overhead until `module_patches` are installed. Names are those of the outermost module's
``named_modules``, without the additions of wrappers such as DDP and torch.compile. In graphs that are traced no
module's call runs, so places come from the tracer, and the graph depends on them.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

import torch
import torch.fx.traceback
from torch import nn

from ..patching import Draft, ItemPatch, Patch
from ..places import Place, is_ours, with_callers
from ..tensors import LOW_DTYPES, tensors_of, widened
from ..torch_internals import (
    FX_MODULE_CALL,
    FX_TRACING,
    MODULE_HOOKS,
    Later,
    has_fake_tensors,
    leave_uncompiled,
    needed_of_later,
    run_when_traced,
    tracing_context,
)
from . import switch
from .module_names import names_change, place_in, serial_of, unwrapped, without_optimized

#: The name under which torch.export puts a model into its own module, and its name in graphs.
EXPORT_ROOT, _EXPORTED = "_export_root", "L__self__"


#: Modules that torch.compile has traced into: its graphs identify them by their ids.
_traced: weakref.WeakValueDictionary[str, nn.Module] = weakref.WeakValueDictionary()


def may_be_compiled() -> bool:
    """Whether torch.compile has been used at all: checked first, since it is fast."""
    return Later.DYNAMO_TRANSLATION in sys.modules


def is_compiled() -> bool:
    """Whether fake tensors are torch.compile's, in whose graphs no module's call runs."""
    return may_be_compiled() and tracing_context() is not None


def traced_place(around: Sequence[nn.Module], state: object) -> Place:
    """Returns the place that torch.compile has recorded, for this graph node or while it traces."""
    running, translators = _running_here(around, state)
    found = place_in(running)
    if translators and not torch.fx.traceback.get_current_meta():
        context = translators[0].output.tracing_context
        _traced_places.setdefault(context, []).append(found)
    return found


def traced_modules(around: Sequence[nn.Module], state: object) -> list[nn.Module]:
    """Returns the modules whose place `traced_place` finds, outermost first.

    The graph is then valid for this outermost module only, not for others of its class.
    """
    running, translators = _running_here(around, state)
    if running and translators and not torch.compiler.is_exporting():
        output = translators[0].output
        _guard_on(_source_of(state, output), "root")
        variable = output.side_effects.id_to_variable.get(id(running[0]))
        if variable is not None and variable.source is not None:
            install_guard = needed_of_later(Later.DYNAMO_GUARDS, "install_guard")
            is_it = needed_of_later(Later.DYNAMO_GUARDS, "GuardBuilder.ID_MATCH")
            install_guard(variable.source.make_guard(is_it))
    return running


def _running_here(around: Sequence[nn.Module], state: object) -> tuple[list[nn.Module], list[Any]]:
    """Returns the running modules, and torch.compile's translators if it is tracing."""
    running = without_optimized(around)
    stack = torch.fx.traceback.get_current_meta().get("nn_module_stack")
    translators = _translators()
    if translators:
        if (
            not torch.compiler.is_exporting()
        ):  # the graph is valid only for calls from the same place
            _guard_on(_source_of(state, translators[0].output), "key")
        if stack is None:
            stack = translators[-1].nn_module_stack
    for key in stack or ():
        module = _traced.get(str(key).partition("@")[0])
        if module is not None and module not in running[-1:]:
            running.append(module)
    return running, translators


#: torch.compile's tracing context -> the places that ops have read.
_traced_places: weakref.WeakKeyDictionary[Any, list[Place]] = weakref.WeakKeyDictionary()


def traced_places() -> str:
    """Returns a string that identifies the places of the ops in the graph that is being compiled.

    Graphs may differ in these alone.
    """
    context = tracing_context()
    places = None if context is None else _traced_places.get(context)
    return repr(places) if places else ""


def _translators() -> list[Any]:
    """Returns the translators of the calls that torch.compile is tracing into, outermost first."""
    translator_class = needed_of_later(Later.DYNAMO_TRANSLATION, "InstructionTranslatorBase")
    lazy = needed_of_later(Later.DYNAMO_VARIABLES, "LazyVariableTracker")
    of_module = needed_of_later(Later.DYNAMO_VARIABLES, "UnspecializedNNModuleVariable")
    found = []
    for frame in with_callers(sys._getframe(1)):
        translator = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        if not isinstance(translator, translator_class):
            continue
        found.append(translator)
        variable: Any = translator.symbolic_locals.get(
            next(iter(translator.f_code.co_varnames), "")
        )
        if isinstance(variable, lazy) and not variable.is_realized():
            module = variable.peek_value()
        else:  # other values may raise errors
            is_module = isinstance(variable, of_module)
            module = variable.value if is_module else None
        if isinstance(module, nn.Module):
            _guard_on(variable.realize().source, "training")
            _traced[str(id(module))] = module
            exported = module._modules.get(EXPORT_ROOT)
            if exported is not None:
                _traced[_EXPORTED] = exported
    return found[::-1]


def _source_of(state: object, output: Any) -> Any:
    global_source = needed_of_later(Later.DYNAMO_SOURCES, "GlobalSource")
    return global_source(output.install_global_by_id("__hmpx_running", state))


def _guard_on(source: Any, attribute: str) -> None:
    """Makes the graph that is being traced valid only while an attribute keeps its current value."""
    if source is None:
        return
    attribute_source = needed_of_later(Later.DYNAMO_SOURCES, "AttrSource")
    install_guard = needed_of_later(Later.DYNAMO_GUARDS, "install_guard")
    equals = needed_of_later(Later.DYNAMO_GUARDS, "GuardBuilder.EQUALS_MATCH")
    install_guard(attribute_source(source, attribute).make_guard(equals))


# --- the running modules --------------------------------------------------------------------------

_F = TypeVar("_F", bound=Callable[..., Any])
_MODULE_CALL: Final = nn.Module._call_impl.__code__


class _Modules(list[nn.Module]):
    """The running modules, outermost first."""

    __slots__ = ("place",)  # read on every call; attributes of `_Running` are much slower
    place: Place | None  # of the innermost one, once it was read

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        super().__init__(modules)
        self.place = None


class _Running(threading.local):
    """The state of a thread."""

    def __init__(self) -> None:
        self.modules = _Modules()
        self.since: object = None  # the `_noting` whose patches have recorded all running calls

    @property
    def key(self) -> str:
        """The value that graphs compiled here depend on: the place of their call."""
        return repr(place_in(_running_modules()))

    @property
    def root(self) -> int:
        """Identifies the outermost running module; 0 without any."""
        modules = _running_modules()
        return serial_of(unwrapped(modules[0])) if modules else 0

    @property
    def is_outside(self) -> bool:
        """Whether the module that alone is converted is not running; False without one."""
        within = switch.within
        if within is None:
            return False
        module = within()
        return not any(each is module for each in without_optimized(_running_modules()))


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


@run_when_traced
def is_outside() -> bool:
    """Whether the current conversion casts only inside of a module, and that is not running.

    In a graph it has to run around the graph: then its result is the program's, which is upcast.
    """
    if switch.within is None:
        return False
    if may_be_compiled() and is_compiled():
        translators = _translators()
        if translators and not torch.compiler.is_exporting():
            _guard_on(_source_of(_running, translators[0].output), "is_outside")
    return _running.is_outside


def _result_of(
    module: nn.Module, result: Any, args: Any, kwargs: Any, around: Sequence[nn.Module]
) -> Any:
    """Returns the result of a module's call, in fp32 where the module alone is converted.

    Unless it computes in low precision itself.
    """
    within = None if switch.within is None else switch.within()
    if within is None or unwrapped(module) is not within or any(each is within for each in around):
        return result
    wide = widened(result)
    if wide is result:
        return result
    own = (*args, *kwargs.values(), *module.parameters())
    return result if any(each.dtype in LOW_DTYPES for each in tensors_of(own)) else wide


leave_uncompiled(_result_of)


def running_module() -> nn.Module | None:
    """Returns the innermost running module, once the patches are installed."""
    return _running.modules[-1] if _running.modules else None


def _running_modules() -> list[nn.Module]:
    return _running.modules or ([] if _running.since is _noting else _running_frames())


def module_patches(draft: Draft, first_call_ended: Callable[[nn.Module], None]) -> Iterator[Patch]:
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
            result = call(self, *args, **kwargs)
        finally:
            running.pop()
            running.place = outer
        return _result_of(self, result, args, kwargs, running)

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
            running.pop()
            result = _result_of(module, result, args, kwargs, running)
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
        module = stand_in.get_base() if hasattr(type(self), "get_base") else self
        running.append(module)
        running.place = None
        try:
            result = call(self, *args, **kwargs)
        finally:
            running.pop()
            running.place = outer
        return _result_of(module, result, args, kwargs, running)

    leave_uncompiled(wrapper, with_callees=False)
    leave_uncompiled(call_outermost, with_callees=False)
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
