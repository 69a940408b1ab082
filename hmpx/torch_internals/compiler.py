"""The private names and behaviours of torch.compile that hmpx relies on.

torch.compile takes seconds to import, so its parts are looked up on first use, and all of them in
`hmpx doctor`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from ..errors import said_by
from ..files import read_sections
from ..forks import new_lock
from ..later import AfterImport
from .modes import SNAPSHOT, is_transformed
from .operators import excluding
from .torch_part import TorchPart, refuse, rely_on, torch_version, warn_once


class Later:
    """Modules of torch.compile."""

    TRACER: Final = "torch.fx.experimental.proxy_tensor"
    SELECT_ALGORITHM: Final = "torch._inductor.select_algorithm"
    CODE_CACHE: Final = "torch._inductor.codecache"
    INDUCTOR_CONFIG: Final = "torch._inductor.config"
    AOT_GRAPHS: Final = "torch._functorch._aot_autograd.graph_compile"
    INDUCTOR_CPP: Final = "torch._inductor.codegen.cpp"
    INDUCTOR_LOWERINGS: Final = "torch._inductor.lowering"
    INDUCTOR_GRAPHS: Final = "torch._inductor.graph"
    INDUCTOR_SUBGRAPHS: Final = "torch._inductor.subgraph_lowering"
    DYNAMO_FUNCTIONS: Final = "torch._dynamo.variables.torch"
    DYNAMO_RULES: Final = "torch._dynamo.trace_rules"
    DYNAMO_TRANSLATION: Final = "torch._dynamo.symbolic_convert"
    DYNAMO_GRAPHS: Final = "torch._dynamo.output_graph"
    DYNAMO_GUARDS: Final = "torch._dynamo.guards"
    DYNAMO_SOURCES: Final = "torch._dynamo.source"
    DYNAMO_VARIABLES: Final = "torch._dynamo.variables"
    #: Modules that store ``Module.__call__`` on import, as `unpatched_nn_module_call`.
    DYNAMO_MODULE_CALLS: Final = ("torch._dynamo.utils", "torch._dynamo.variables.nn_module")


_F = TypeVar("_F", bound=Callable[..., Any])


def of_later(module: str, name: str, *, is_needed: bool = False) -> Any:
    """Returns an attribute of a loaded module; without it raises an error if needed, else None after a warning."""
    try:
        return _attribute_of(sys.modules.get(module), name)
    except AttributeError:
        (refuse if is_needed else warn_once)([_part_of_later(module)])
        return None


needed_of_later = functools.partial(of_later, is_needed=True)


def _attribute_of(owner: Any, dotted_name: str) -> Any:
    for attribute in dotted_name.split("."):
        is_item = isinstance(owner, dict) and attribute in owner
        owner = owner[attribute] if is_item else getattr(owner, attribute)
    return owner


@functools.cache
def _later() -> dict[str, TorchPart]:
    """Returns each part that ``compiler.ini`` lists, by its module."""
    return {
        module: TorchPart(keys["feature"], tuple(keys["names"].split()), keys["without"])
        for module, keys in read_sections(str(__package__), "compiler.ini").items()
    }


def _part_of_later(module_name: str) -> TorchPart:
    module = sys.modules.get(module_name)  # another version of torch may have moved it
    for name in _later()[module_name].names:
        try:
            _attribute_of(module, name)
        except AttributeError:
            fault = f"torch has no {module_name}.{name}"
            return dataclasses.replace(_later()[module_name], fault=fault)
    return _later()[module_name]


def later_parts() -> Iterator[TorchPart]:
    """Imports and yields the parts of torch.compile."""
    for name, part in _later().items():
        try:
            importlib.import_module(name)
        except ImportError as error:
            yield dataclasses.replace(part, fault=said_by(error))
        else:
            yield _part_of_later(name)


def disable_inductor_caches() -> None:
    """Stops torch.compile's backend from reading and writing the disk cache."""
    config: Any = importlib.import_module(Later.INDUCTOR_CONFIG)
    config.force_disable_caches = True


def run_when_traced(function: _F) -> _F:
    """Makes torch.compile run ``function`` once, at trace time, instead of tracing into it."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


run_when_traced(is_transformed)


def _take_dataclasses(functions: Any) -> None:
    """Makes torch.compile pass frozen dataclasses to functions that run when traced, as since torch 2.12."""
    invoke = functions.invoke_and_store_as_constant

    def constant(variable: Any) -> Any:
        found = variable.realize()
        if type(found).__name__ != "FrozenDataClassVariable":
            return found
        if found.source is not None:
            guards: Any = importlib.import_module(Later.DYNAMO_GUARDS)
            guards.install_guard(found.make_guard(guards.GuardBuilder.ID_MATCH))
        found.as_python_constant = lambda: found.value
        return found

    def invoke_with(tx: Any, fn: Any, name: str, args: Any, kwargs: Any) -> Any:
        named = {key: constant(value) for key, value in kwargs.items()}
        return invoke(tx, fn, name, [constant(value) for value in args], named)

    functions.invoke_and_store_as_constant = invoke_with


def _fold_below_dispatcher(folding: Any) -> None:
    """Hides comparisons of tensors that torch.compile made for itself before torch 2.12."""
    run = folding.ConstantFolder.run

    def run_below(self: Any, *args: Any, **kwargs: Any) -> Any:
        with excluding(SNAPSHOT):
            return run(self, *args, **kwargs)

    folding.ConstantFolder.run = run_below


if torch_version() < (2, 12):
    _mending: Final = {
        "torch._dynamo.variables.functions": _take_dataclasses,
        "torch._inductor.constant_folding": _fold_below_dispatcher,
    }
    for _name in _mending.keys() & sys.modules.keys():
        _mending[_name](sys.modules[_name])
    sys.meta_path.insert(0, AfterImport(_mending))


#: Whether inductor can be configured to round where eager mode does, on CPUs too.
CAN_KEEP_CASTS: Final = torch_version() >= (2, 13)
#: Whether torch.compile puts `torch.set_autocast_enabled` into graphs by itself.
TRACES_AUTOCAST_STATES: Final = torch_version() >= (2, 12)
#: Whether it traces `copy.copy`, and ``_make`` of named tuples.
TRACES_COPIES: Final = torch_version() >= (2, 12)

# Read now: a conversion replaces the first.
_is_autocast_enabled: Any = torch.is_autocast_enabled
_set_autocast_enabled: Any = torch.set_autocast_enabled


def trace_autocast_states(rules: Any) -> None:
    """Makes torch.compile, whose ``trace_rules`` these are, put `torch.set_autocast_enabled` into graphs."""
    name, functions = "torch._C.set_autocast_enabled", rules.TorchInGraphFunctionVariable
    if rules.manual_torch_name_rule_map[name] is functions:
        return
    rules.manual_torch_name_rule_map[name] = functions
    get_handlers = functions._get_handlers

    def get_more() -> Any:
        handlers = get_handlers()
        handlers[_set_autocast_enabled] = _set_in_graph
        return handlers

    get_more.cache_clear = get_handlers.cache_clear  # type: ignore[attr-defined]
    functions._get_handlers = staticmethod(get_more)
    rules.get_torch_obj_rule_map.cache_clear()


def _set_in_graph(variable: Any, translator: Any, *args: Any) -> Any:
    """Sets a state of torch.autocast in the graph, and until the end of tracing."""
    output, values = translator.output, [each.as_python_constant() for each in args]
    output.create_node(
        "call_function", _set_autocast_enabled, tuple(each.as_proxy() for each in args)
    )
    before = _is_autocast_enabled(*values[:-1])
    output.add_cleanup_hook(lambda: _set_autocast_enabled(*values[:-1], before))
    _set_autocast_enabled(*values)
    compile_graph = output.call_user_compiler

    def compile_unchanged(*given: Any, **named: Any) -> Any:
        found = _is_autocast_enabled(*values[:-1])  # a backend that traces the graph sets it again
        try:
            return compile_graph(*given, **named)
        finally:
            _set_autocast_enabled(*values[:-1], found)

    output.call_user_compiler = compile_unchanged
    return sys.modules["torch._dynamo.variables"].ConstantVariable.create(None)


def add_guard(builder: Any, guard: Any, holds: Callable[[Any], bool], meaning: str) -> None:
    """Makes a graph run only if ``holds``."""
    builder.guard_manager.root.add_lambda_guard(holds, [meaning], guard.user_stack)


def leave_uncompiled(function: Any, *, with_callees: bool = True) -> None:
    """Makes torch.compile start no graph in ``function``; inside of one it traces through it.

    Nor in its callees, as in torch's own functions in C++. Without them for code that all modules share, like
    Module's own: torch.compile compiles one code object only a few times.
    """
    if _eval_frame is not None:
        skip, default = _eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.DEFAULT
        strategy = _eval_frame._FrameExecStrategy(skip, skip if with_callees else default)
        _eval_frame.set_code_exec_strategy(function.__code__, strategy)


_eval_frame = rely_on("torch.compile in the middle of calls", instead=(None,))


def forget_traced(*, keeps_graphs: bool = False) -> None:
    """Clears torch.compile's table of torch's functions, and its graphs unless they are kept."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None or not hasattr(dynamo, "reset"):  # not imported, or not completely
        return
    # On a machine with CUDA ``reset`` imports inductor, which takes seconds.
    if not keeps_graphs and getattr(dynamo.convert_frame, "FRAME_COUNTER", True):
        with _counting_without_driver():
            dynamo.reset()
    if hasattr(dynamo.trace_rules, "clear_lru_cache"):
        dynamo.trace_rules.clear_lru_cache()
    functions = vars(sys.modules.get("torch._dynamo.variables.torch", types))
    known: Any = getattr(functions.get("TorchInGraphFunctionVariable"), "_get_handlers", None)
    if hasattr(known, "cache_clear"):  # a table of torch's functions as they were at its first use
        known.cache_clear()


#: Makes torch count CUDA devices through their management library, without touching the driver.
_NVML_CHECK: Final = "PYTORCH_NVML_BASED_CUDA_CHECK"


@contextlib.contextmanager
def _counting_without_driver() -> Iterator[None]:
    """Keeps `torch.cuda.is_available`, which ``reset`` calls before torch 2.14, from initializing CUDA.

    Processes forked later could not use the device.
    """
    if torch.cuda.is_initialized() or _NVML_CHECK in os.environ:  # type: ignore[no-untyped-call]
        yield
        return
    try:
        os.environ[_NVML_CHECK] = "1"
        yield
    finally:
        os.environ.pop(_NVML_CHECK, None)


def is_dynamo_frame(frame: Any) -> bool:
    """Whether a frame belongs to torch.compile's tracing."""
    return str(frame.f_globals.get("__name__")).startswith("torch._dynamo.")


def tracing_context() -> Any:
    """Returns an object that identifies the graph being traced by torch.compile; None without one."""
    return _tracing_context.try_get()


_tracing_context = rely_on("graphs that torch.compile is tracing")


_HIGHER_ORDER: Final = str(Path(torch.__file__).parent / "_higher_order_ops")
#: Modules there whose functions are part of the graph around them.
_INLINED: Final = ("effects.py", "wrap.py")


def is_in_subgraph() -> bool:
    """Whether a branch or body is traced, of ``torch.cond`` or flex_attention, which can have no effects."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_HIGHER_ORDER) and not path.endswith(_INLINED):
            return True
        frame = frame.f_back
    return False


# --- compiled functions that run uncompiled --------------------------------------------------------

_stance_lock: Final = new_lock()
#: The open blocks: torch has one stance for the whole process, which lasts from the first to the last.
_asking: Final[set[object]] = set()
_stance: Final = contextlib.ExitStack()
_eagerly: Any = functools.partial(torch.compiler.set_stance, "force_eager")

if torch_version() == (2, 12):  # it warns that nothing is compiled, whatever the stance

    @contextlib.contextmanager
    def _eagerly() -> Iterator[None]:
        frames: Any = sys.modules["torch._dynamo.eval_frame"]
        count = frames.set_fullgraph_compiled_frame_count
        frames.set_fullgraph_compiled_frame_count = lambda number: 1
        try:
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            frames.set_fullgraph_compiled_frame_count = count


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Runs compiled functions uncompiled, in all threads, until the end of the block."""
    block = object()
    try:
        with _stance_lock:
            if not _asking and "torch._dynamo" not in sys.modules:  # its import takes seconds
                sys.meta_path.insert(0, _later_stance)
            elif not _asking:
                _stance.enter_context(_eagerly())
            _asking.add(block)
        yield
    finally:
        if not sys.is_finalizing():  # a block that was never left: torch's modules are gone
            with _stance_lock:
                _asking.discard(block)
                if not _asking:
                    _stance.close()
                    if _later_stance in sys.meta_path:
                        sys.meta_path.remove(_later_stance)


def in_compiled_call() -> bool:
    """Whether a compiled function is running in this thread, compiled or not."""
    module = sys.modules.get("torch._dynamo.eval_frame")
    frame: types.FrameType | None = sys._getframe(1)
    while module is not None and frame is not None:
        if frame.f_code.co_filename == module.__file__:
            return True
        frame = frame.f_back
    return False


def _set_stance(module: object) -> None:
    with _stance_lock:
        if _asking:
            _stance.enter_context(_eagerly())


_later_stance: Final = AfterImport({"torch._dynamo": _set_stance})


@functools.cache
def casts_of_aten() -> frozenset[Any]:
    """Returns the ATen operators that only cast, including private ones."""
    names = ("_to_copy", "to", "_autocast_to_reduced_precision")  # `to` in inference mode
    return frozenset(
        [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
    )
