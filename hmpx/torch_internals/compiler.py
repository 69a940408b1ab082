"""The private names and behaviours of torch.compile that hmpx relies on.

torch.compile takes seconds to import, so its parts are looked up where they are first needed, and all
of them in `hmpx doctor`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, noop_context_fn

from ..errors import said_by
from .autocast import OFF_MARK
from .autograd import CHECKPOINT_GENERATOR
from .compiler_names import INDUCTOR_CONFIG, LATER
from .torch_part import Part, refuse, rely_on, warn_once
from .tracing import dispatch_modes, has_fake_tensors, is_graph_made, is_transformed

_F = TypeVar("_F", bound=Callable[..., Any])


def of_later(module: str, name: str) -> Any:
    """Returns an attribute of a loaded module; warns once and returns None if it is missing."""
    try:
        return _attribute_of(sys.modules.get(module), name)
    except AttributeError:
        warn_once([_part_of_later(module)])
        return None


def _attribute_of(owner: Any, dotted_name: str) -> Any:
    for attribute in dotted_name.split("."):
        is_item = isinstance(owner, dict) and attribute in owner
        owner = owner[attribute] if is_item else getattr(owner, attribute)
    return owner


def needed_of_later(module: str, name: str) -> Any:
    """Returns an attribute of a loaded module.

    Raises:
        TorchError: The attribute is missing.
    """
    try:
        return _attribute_of(sys.modules.get(module), name)
    except AttributeError:
        return refuse([_part_of_later(module)])


def _part_of_later(module_name: str) -> Part:
    later, fault = LATER[module_name], ""
    module = sys.modules.get(module_name)  # another version of torch may have moved it
    for name in later.names:
        try:
            _attribute_of(module, name)
        except AttributeError:
            fault = f"torch has no {module_name}.{name}"
            break
    names = tuple([f"{module_name}.{name}" for name in later.names])
    return Part(later.feature, names, "2.13", later.without, False, fault)


def later_parts() -> Iterator[Part]:
    """Yields the parts of torch.compile, importing them for this."""
    for name in LATER:
        try:
            importlib.import_module(name)
        except ImportError as error:
            later = LATER[name]
            yield Part(later.feature, (name,), "2.13", later.without, False, said_by(error))
        else:
            yield _part_of_later(name)


def tries() -> Iterator[Part]:
    """Yields parts that report how torch.compile and checkpoints behave when run; takes seconds."""
    for feature, behaves, without in _TRIES:
        try:
            fault = "" if behaves() else "it did not do what was expected"
        except Exception as error:  # another version of torch may raise anything here
            fault = f"trying it raised {said_by(error)}"
        yield Part(feature, (), "2.13", without, False, fault)


def _runs_once() -> bool:
    calls = []

    @run_when_traced
    def constant() -> int:
        calls.append(1)
        return 3

    compiled = torch.compile(lambda x: x + constant(), backend="eager", fullgraph=True)
    results = [compiled(torch.zeros(1)).item() for _ in range(2)]
    return results == [3, 3] and len(calls) == 1


def _guards_on_marks() -> bool:
    marked = torch.is_autocast_enabled

    def function(x: Tensor) -> Tensor:
        return x + 1 if marked(OFF_MARK) else x

    compiled = torch.compile(function, backend="eager", fullgraph=True)
    results = []
    for is_on in (False, True, False):
        torch.set_autocast_enabled(OFF_MARK, is_on)
        try:
            results.append(compiled(torch.zeros(1)).item())
        finally:
            torch.set_autocast_enabled(OFF_MARK, False)
    return results == [0, 1, 0]


def _sees_fake_tensors() -> bool:
    from torch._subclasses import FakeTensorMode

    before = has_fake_tensors(), is_graph_made(), dispatch_modes()
    with FakeTensorMode():
        inside = has_fake_tensors(), is_graph_made(), dispatch_modes()
    return before == (False, False, 0) and inside == (True, True, 1)


def _goes_through_generators() -> bool:
    seen = []

    def contexts() -> Any:
        seen.append(sys._getframe(1).f_code.co_name)
        return noop_context_fn()  # type: ignore[no-untyped-call]

    x = torch.ones(1, requires_grad=True)
    checkpoint(torch.exp, x, use_reentrant=False, context_fn=contexts)
    return seen == [CHECKPOINT_GENERATOR]


_TRIES: Final = (
    ("functions run at trace time", _runs_once, "graphs break, and hold stale decisions"),
    ("disable_casts in graphs", _guards_on_marks, "graphs cast where casts are off"),
    (
        "calls that become part of a graph",
        _sees_fake_tensors,
        "graphs round otherwise than eager mode",
    ),
    ("checkpoints", _goes_through_generators, "they are recomputed under the casts of backward"),
)


def disable_inductor_caches() -> None:
    """Stops torch.compile's back end from writing to the disk cache, and from reading it."""
    config: Any = importlib.import_module(INDUCTOR_CONFIG)
    config.force_disable_caches = True


def run_when_traced(function: _F) -> _F:
    """Makes torch.compile run ``function`` once, at trace time, instead of tracing into it."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


run_when_traced(is_transformed)


def leave_to_callees(function: Any) -> None:
    """Makes torch.compile start its graphs in the callees of ``function``, as for Module's own functions.

    This is for code that all modules share: torch.compile compiles one code object only a few times.
    Where it meets ``function`` inside a graph, it traces through it.
    """
    code, eval_frame = function.__code__, _eval_frame
    if hasattr(eval_frame, "skip_code"):
        eval_frame.skip_code(code)
    elif hasattr(eval_frame, "set_code_exec_strategy"):
        action = eval_frame._FrameAction
        strategy = eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
        eval_frame.set_code_exec_strategy(code, strategy)


_eval_frame = rely_on(
    "torch._C._dynamo.eval_frame",
    feature="torch.compile in the middle of calls",
    since="2.13",
    without="graphs begin in hmpx's own functions, and are compiled again more often",
    behaves=lambda module: (
        hasattr(module, "skip_code") or hasattr(module, "set_code_exec_strategy")
    ),
    instead=(None,),
)


def forget_traced(*, keeps_graphs: bool = False) -> None:
    """Clears torch.compile's table of torch's functions, and its graphs unless they are kept."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None or not hasattr(dynamo, "reset"):  # not imported, or not completely
        return
    if not keeps_graphs:
        with _counting_without_driver():
            dynamo.reset()
    if hasattr(dynamo.trace_rules, "clear_lru_cache"):
        dynamo.trace_rules.clear_lru_cache()


#: Makes torch count CUDA devices through their management library, without touching the driver.
_NVML_CHECK: Final = "PYTORCH_NVML_BASED_CUDA_CHECK"


@contextlib.contextmanager
def _counting_without_driver() -> Iterator[None]:
    """Keeps `torch.cuda.is_available`, which ``reset`` calls before torch 2.14, from initializing CUDA.

    Processes that are forked afterwards could not use the device.
    """
    if torch.cuda.is_initialized() or _NVML_CHECK in os.environ:  # type: ignore[no-untyped-call]
        yield
        return
    try:
        os.environ[_NVML_CHECK] = "1"
        yield
    finally:
        os.environ.pop(_NVML_CHECK, None)


def is_dynamo_loaded() -> bool:
    """Whether torch.compile's front end is imported, which takes seconds."""
    return "torch._dynamo" in sys.modules


def is_dynamo_frame(frame: Any) -> bool:
    """Whether a frame belongs to torch.compile's tracing."""
    return str(frame.f_globals.get("__name__")).startswith("torch._dynamo.")


def tracing_context() -> Any:
    """Returns an object that identifies the graph being traced by torch.compile; None without one."""
    return _tracing_context.try_get()


_tracing_context = rely_on(
    "torch._guards.TracingContext",
    feature="graphs that torch.compile is tracing",
    since="2.13",
    without="sections by module would not hold in them",
    behaves=lambda context: context.try_get() is None or is_dynamo_loaded(),
)


@functools.cache
def casts_of_aten() -> frozenset[Any]:
    """Returns the ATen operators that only cast, including private ones."""
    names = ("_to_copy", "to", "_autocast_to_reduced_precision")  # `to` in inference mode
    return frozenset(
        [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
    )
