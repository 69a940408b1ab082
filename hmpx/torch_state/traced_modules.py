"""The places of ops in graphs that torch.compile and torch.export trace.

No module's call runs there, so places come from the tracer, and the graph depends on them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx.traceback
from torch import nn

from ..places import Place, with_callers
from ..torch_internals import (
    Later,
    needed_of_later,
    tracing_context,
)
from .module_names import place_in, without_optimized

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
        _guard_on_surroundings(translators[0], state)
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


def _guard_on_surroundings(translator: Any, state: object) -> None:
    """Makes the graph that is being traced valid only for calls from the same place."""
    if torch.compiler.is_exporting():
        return
    _guard_on(_source_of(state, translator.output), "key")


def _source_of(state: object, output: Any) -> Any:
    """Returns the source of ``state`` in the graph that is being traced."""
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
