"""Autograd's graph: every node behind some tensors, and which op and module of a run made each node."""

from __future__ import annotations

import bisect
import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from .. import ops, session, torch_state
from ..inputs import Steps
from ..observers import Attached, OpCall, Values
from ..tensors import edges_of, node_of, short_name, tensors_in
from ..torch_internals import (
    disable_modes,
    function_of,
    next_number,
    number_of,
    outputs_of,
    uncompiled,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: An output's dtype and shape, as far as known.
Output = tuple[torch.dtype | None, tuple[int, ...] | None]


@dataclass(slots=True, eq=False)
class Step:
    """One node of autograd's graph."""

    node: Any  # held, since the id is that of its Python object
    name: str  # autograd's: "AddmmBackward0"
    op: str  # ATen's or the function's name: "addmm"
    kind: Literal["leaf", "cast", "view", "op"]
    leaf: Tensor | None
    outputs: list[Output]
    inputs: list[tuple[int, int]] = field(default_factory=list)  # steps, and which output of each
    number: int | None = None  # greater for steps made later; None if unknown
    is_own: bool = False  # one of hmpx's own functions made it
    is_open: bool = False  # its inputs were not walked

    def output(self, position: int = 0) -> Output:
        """Returns the dtype and the shape of one output; None for unknown ones."""
        if self.leaf is not None:
            return self.leaf.dtype, tuple(self.leaf.shape)
        return self.outputs[position] if position < len(self.outputs) else (None, None)


def walk(tensors: Iterable[Tensor], most: int) -> tuple[list[Step], dict[int, int]]:
    """Returns the steps behind ``tensors``, and ``id`` of a node -> position of its step.

    Follows at most ``most`` steps; those nearest to the tensors come first.
    """
    steps: list[Step] = []
    positions: dict[int, int] = {}

    def position_of(node: Any) -> int:
        found = positions.get(id(node))
        if found is None:
            found = positions[id(node)] = len(steps)
            steps.append(_step(node))
        return found

    for tensor in tensors:
        position_of(node_of(tensor))
    for done, step in enumerate(steps):  # grows in the loop
        if done >= most:
            step.is_open = step.leaf is None
            continue
        for node, output in edges_of(step.node):
            if node is not None:
                step.inputs.append((position_of(node), output))
    for step in steps:
        if step.op == "to_copy" and step.inputs:  # it may also copy to another device
            position, output = step.inputs[0]
            before, after = steps[position].output(output)[0], step.output()[0]
            if before is None or after is None or before is not after:
                step.kind = "cast"
    for step in [*steps]:
        if step.name in _CASTING:
            _separate_casts(step, steps)
    return steps, positions


#: Names of compiled nodes that cast their inputs; torch's nodes of these names have inputs of one dtype.
_CASTING: Final = frozenset({"LinearBackward0", "ScaledDotProductFlashAttentionForCpuBackward0"})


def _separate_casts(step: Step, steps: list[Step]) -> None:
    """Appends a step for the casts that a compiled node makes of its inputs."""
    cast = Step(step.node, "ToCopyBackward0", "to_copy", "cast", None, [], number=step.number)
    dtype, _ = step.output()
    for place, (position, output) in enumerate(step.inputs):
        before, shape = steps[position].output(output)
        if before is not None and before is not dtype:
            step.inputs[place] = len(steps), len(cast.outputs)
            cast.inputs.append((position, output))
            cast.outputs.append((dtype, shape))
    if cast.inputs:
        steps.append(cast)


def _step(node: Any) -> Step:
    name = str(node.name())
    if name.endswith("AccumulateGrad"):
        return Step(node, name, "", "leaf", node.variable, [])
    function = function_of(node)
    op = _op_name(name) if function is None else _NAMES.get(function.__name__, function.__name__)
    kind: Literal["cast", "view", "op"] = "op"
    is_own = function is not None and function.__module__.startswith("hmpx.")
    if is_own:
        drawn_as = getattr(function, "drawn_as", op)
        kind, op = ("cast", op) if drawn_as == "cast" else ("op", drawn_as)
    elif function is None and _is_view(op):
        kind = "view"
    outputs, number = outputs_of(node), number_of(node)
    return Step(node, name, op, kind, None, outputs, number=number, is_own=is_own)


#: Better names for torch's own functions.
_NAMES: Final = {"CompiledFunction": "compiled graph", "CheckpointFunction": "checkpoint"}

#: Views that autograd names, but lists can't.
_VIEWS: Final = frozenset({"alias", "reshape_alias", "slice", "unsafe_view", "view_as_real"})


def _is_view(op: str) -> bool:
    known = ops.names().get(op)  # those two copy values, and so get their own node
    is_known_view = known is not None and op not in ("clone", "index") and ops.is_view(known)
    return op in _VIEWS or is_known_view


def _op_name(name: str) -> str:
    """Returns ``"native_layer_norm"`` for ``"NativeLayerNormBackward0"``."""
    bare = re.sub(r"Backward\d*$", "", name) or name
    bare = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", bare.rpartition("::")[2])
    return bare.lower()


def short(dtype: torch.dtype | None) -> str:
    """Returns the short name of a dtype; "" if unknown."""
    return "" if dtype is None else short_name(dtype)


# --- observed runs -----------------------------------------------------------------------------------


class Names:
    """Qualified names of modules and parameters, those of the first model without a prefix."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.classes: dict[str, str] = {}  # qualified name of a module -> name of its class
        self.parameters: dict[int, str] = {}  # id of a parameter -> its qualified name
        self._modules: dict[int, str] = {}
        self.models: list[nn.Module] = []  # held, so that their ids are not reused
        if model is not None:
            self._adopt(model, "")

    def of(self, module: nn.Module, outer: str | None) -> str:
        """Returns the name of ``module``, which module ``outer`` calls; None outside of any."""
        if id(module) not in self._modules:
            prefix = type(module).__name__ if self.models or outer else ""
            self._adopt(module, f"{outer}.{prefix}" if outer else prefix)
        return self._modules[id(module)]

    def _adopt(self, model: nn.Module, prefix: str) -> None:
        self.models.append(model)
        for name, module in torch_state.named_modules(model):
            path = ".".join([part for part in (prefix, name) if part])
            self._modules.setdefault(id(module), path)
            self.classes.setdefault(path, type(module).__name__)
            for own, parameter in module.named_parameters(recurse=False):
                self.parameters.setdefault(id(parameter), f"{path}.{own}" if path else own)


@dataclass
class Observation:
    """A recorded run: the calls of ops in order, and the nodes that belong to each call."""

    names: Names
    calls: list[OpCall] = field(default_factory=list)
    owners: dict[int, tuple[Any, int]] = field(
        default_factory=dict
    )  # id -> node, its call's position
    boundaries: list[int] = field(default_factory=list)  # the first numbers of nodes
    modules: list[str] = field(default_factory=list)  # of this module

    def module_of(self, number: int | None) -> str | None:
        """Returns the module that made the node with that number; None if unknown."""
        if number is None or not self.boundaries:
            return None
        position = bisect.bisect_right(self.boundaries, number) - 1
        return self.modules[position] if position >= 0 else ""

    def add(self, call: OpCall, /, *values: Unpack[Values]) -> None:
        """Assigns the nodes between a call's inputs and its results to the call."""
        _, args, kwargs, result = values
        given = tensors_in([args, list(kwargs.values())])
        waiting = [node for each in tensors_in([result]) if (node := node_of(each)) is not None]
        is_in_place = call.site.endswith("_") and not call.site.endswith("__")
        writes = is_in_place or call.cast_policy == "TARGET" or kwargs.get("out") is not None
        inputs = [] if writes else [node_of(tensor) for tensor in given]
        before = set(map(id, inputs))  # of nodes that are held, since identities are reused
        position = len(self.calls)
        self.calls.append(call)
        while waiting:
            node = waiting.pop()
            edges = edges_of(node)
            if id(node) in self.owners or id(node) in before or not edges:
                continue
            self.owners[id(node)] = node, position
            if not writes:  # a tensor that it wrote to had another node before, unknown by now
                waiting += [each for each, _ in edges if each is not None]


def observed(function: Callable[..., Any], inputs: Any, names: Names) -> tuple[Any, Observation]:
    """Calls ``function`` with gradients and returns its result and the observation.

    Compiled functions run uncompiled, since a compiled graph is a single node without details.
    """
    observation = Observation(names)
    with contextlib.ExitStack() as stack:
        stack.enter_context(uncompiled())
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_following_modules(observation))
        if session.is_converted():
            stack.enter_context(Attached(observation.add, every_op=True, values=True))
        return Steps("draw", function).forward(inputs), observation


@contextlib.contextmanager
def _following_modules(observation: Observation) -> Iterator[None]:
    running: list[str] = []

    def mark() -> None:
        with disable_modes(), torch_state.without_casts():
            number = next_number()
        if number is not None:
            observation.boundaries.append(number)
            observation.modules.append(running[-1] if running else "")

    def begin(module: nn.Module, args: Any) -> None:
        running.append(observation.names.of(module, running[-1] if running else None))
        mark()

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if running:
            running.pop()
        mark()

    with contextlib.ExitStack() as stack:
        models = observation.names.models
        for module in [each for model in models for _, each in torch_state.named_modules(model)]:
            stack.callback(module.register_forward_pre_hook(begin).remove)
            stack.callback(module.register_forward_hook(end, always_call=True).remove)
        if not models:  # hooks on all modules, about which compiled ones warn
            stack.callback(register_module_forward_pre_hook(begin).remove)
            stack.callback(register_module_forward_hook(end, always_call=True).remove)
        yield
