"""Where ops are called in the graphs that torch.compile and torch.export trace.

No module's call runs there: what traces it is asked, and the graph is made to depend on the answer.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx.traceback
from torch import nn

from ..frames import with_callers
from ..places import Place
from ..torch_internals import (
    DYNAMO_GUARDS,
    DYNAMO_SOURCES,
    DYNAMO_TRANSLATION,
    DYNAMO_VARIABLES,
    needed_of_later,
    tracing_context,
)
from .module_names import place_in, without_optimized

#: Under which name torch.export puts a model into a module of its own, and what its graphs call it.
EXPORT_ROOT, _EXPORTED = "_export_root", "L__self__"


#: Modules that torch.compile has traced into: its graphs know them by their ids.
_traced: weakref.WeakValueDictionary[str, nn.Module] = weakref.WeakValueDictionary()


def is_compiled() -> bool:
    """Whether the fake tensors are those of torch.compile, in whose graphs no module's call runs."""
    return DYNAMO_TRANSLATION in sys.modules and tracing_context() is not None


def traced_place(around: Sequence[nn.Module], state: object) -> Place:
    """Returns the place that torch.compile has noted: for this node of its graph, or as it traces.

    Args:
        around: The modules that are running around the graph.
        state: Has as its ``key`` what the graph depends on: where it is called from.
    """
    running = without_optimized(around)
    meta = torch.fx.traceback.get_current_meta()
    stack = meta.get("nn_module_stack")
    translators = _translators()
    if translators:
        _guard_on_surroundings(translators[0], state)
        if stack is None:
            stack = translators[-1].nn_module_stack
    for key in stack or ():
        module = _traced.get(str(key).partition("@")[0])
        if module is not None and module not in running[-1:]:
            running.append(module)
    found = place_in(running)
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
        else:  # the values of others than modules may raise errors
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
    """Has the graph that is being traced hold only where it is called from such a place as this."""
    if torch.compiler.is_exporting():
        return
    global_source = needed_of_later(DYNAMO_SOURCES, "GlobalSource")
    name = translator.output.install_global_by_id("__hmpx_running", state)
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
