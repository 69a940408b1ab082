"""Runs a function and records what autograd's graph lacks: which op and module made each node."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from .. import session, torch_state
from ..observers import Attached, OpCall
from ..tensors import edges_of, node_of, tensors_in
from ..torch_internals import disable_modes, next_number, uncompiled


class Names:
    """Qualified names of modules and parameters, those of the first model without a prefix."""

    def __init__(self, model: nn.Module | None = None) -> None:
        """Starts with the names of ``model``."""
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

    def add(
        self,
        call: OpCall,
        _: list[Tensor],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
        /,
    ) -> None:
        """Assigns the nodes between a call's inputs and its results to the call."""
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


def observed(
    function: Callable[..., Any], args: tuple[Any, ...], names: Names
) -> tuple[Any, Observation]:
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
        return function(*args), observation


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
