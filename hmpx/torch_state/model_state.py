"""Saves and restores the state that runs of a model change; finds the modules that a function runs."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from ..tensors import PLAIN_TENSORS, edges_of, is_dense, node_of, stored_parameters, tensors_in
from .disabling import without_casts


class RandomStates:
    """The states of random numbers: torch's on the CPU and on some devices, Python's and NumPy's."""

    def __init__(self, devices: Iterable[torch.device], *, of_torch_alone: bool = False) -> None:
        #: Functions that restore them, each with its arguments, of which the first is the state.
        self.states: list[tuple[Callable[..., object], tuple[Any, ...]]]
        self.states = [(torch.set_rng_state, (torch.get_rng_state(),))]
        for device in sorted(devices, key=str):
            module: Any = None
            if device.type not in ("cpu", "meta"):
                module = torch.get_device_module(device)
            if hasattr(module, "get_rng_state"):
                self.states.append((module.set_rng_state, (module.get_rng_state(device), device)))
        numpy: Any = sys.modules.get("numpy")
        if not of_torch_alone:
            self.states.append((random.setstate, (random.getstate(),)))
        if not of_torch_alone and numpy is not None:
            self.states.append((numpy.random.set_state, (numpy.random.get_state(),)))

    def restore(self) -> None:
        """Restores them."""
        for set_state, state in self.states:
            set_state(*state)


def state_of_random_numbers(values: Iterable[Any]) -> RandomStates:
    """Returns torch's RNG state for calls with these arguments."""
    return RandomStates({tensor.device for tensor in tensors_in(values)}, of_torch_alone=True)


def seed_all(seed: int) -> None:
    """Seeds torch on all devices, Python and, if loaded, NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


class Reached(NamedTuple):
    """The objects that a function can run."""

    modules: tuple[nn.Module, ...]  # without those inside them
    generators: tuple[torch.Generator, ...]


def reached_by(model: Callable[..., Any], *inputs: Any) -> Reached:
    """Returns the objects that a model can run, in its attributes, closures, defaults, arguments and globals."""
    modules: list[nn.Module] = []
    generators: list[torch.Generator] = []
    seen: set[int] = set()
    rest: list[Any] = [*inputs, model]
    while rest:
        value = rest.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Generator):
            generators.append(value)
        elif isinstance(value, nn.Module):
            modules.append(value)
            inside = list(value.modules())
            seen.update(map(id, inside))
            rest += [each for module in inside for each in vars(module).values() if _leads(each)]
        else:
            rest += _held(value)
    return Reached(tuple(modules), tuple(generators))


def _held(value: Any) -> Iterator[Any]:
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield value.__func__
        yield value.__self__
        yield from filter(_leads, getattr(value.__self__, "__dict__", {}).values())
    elif isinstance(value, types.FunctionType):
        yield from _held_by_function(value)
    elif type(value) in (list, tuple):
        yield from filter(_leads, value)
    elif type(value) is dict:
        yield from filter(_leads, value.values())
    elif callable(value) and not isinstance(value, type | types.ModuleType):
        yield from filter(_leads, getattr(value, "__dict__", {}).values())


def _held_by_function(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an empty cell
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for name in function.__code__.co_names:
        found = function.__globals__.get(name)
        is_other = isinstance(found, types.FunctionType) and (
            found.__globals__ is not function.__globals__
        )
        if _leads(found) and not is_other:
            yield found


def _leads(value: Any) -> bool:
    """Whether ``value`` may contain such objects."""
    kinds = (
        nn.Module, torch.Generator, functools.partial, types.MethodType, types.FunctionType, list, tuple, dict
    )  # fmt: skip
    return isinstance(value, kinds)


#: Containers in attributes of modules whose contents are restored; hooks are in others.
_CONTAINERS: Final = (dict, list, set)


class ModelState:
    """The current state of some modules and of random number generators."""

    @without_casts()
    def __init__(self, reached: Reached, inputs: Iterable[Tensor]) -> None:
        """Saves the state."""
        every = [each for module in reached.modules for each in module.modules()]
        self._attributes = [_Attributes(module) for module in every if not _is_lazy(module)]
        parameters = [each for module in reached.modules for each in stored_parameters(module)]
        buffers = [each for module in reached.modules for each in module.buffers()]
        self._values = [_Values(each) for each in buffers if _is_kept(each)]
        self._parameters = [_Values(each) for each in parameters if _is_kept(each)]
        self._gradients: list[tuple[Tensor, Tensor | None]] = [
            (each, each.grad) for each in parameters
        ]
        self._known = {id(each) for each in parameters}
        self._learns = [(each, each.requires_grad) for each in parameters]
        self._hooks: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._generators = [(each, each.get_state()) for each in reached.generators]
        self._random = RandomStates({each.device for each in (*parameters, *inputs)})

    def suspend_hooks(self) -> None:
        """Removes users' hooks on finished gradients, such as those that step an optimizer."""
        for parameter, _ in self._gradients:
            hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
            if hooks:
                self._hooks.append((hooks, dict(hooks)))
                hooks.clear()

    def keep_gradients(self, scalars: Iterable[Tensor]) -> None:
        """Saves and removes the gradients of other tensors that a backward of ``scalars`` reaches."""
        for leaf in _leaves(scalars):
            if id(leaf) not in self._known:
                self._known.add(id(leaf))
                self._gradients.append((leaf, leaf.grad))
                leaf.grad = None

    @without_casts()
    def forget_unwritten(self) -> None:
        """Drops copies of parameters that a run has not written to: later runs won't either."""
        self._parameters = [each for each in self._parameters if not each.is_same()]

    @without_casts()
    def restart(self) -> None:
        """Restores everything except gradients, and removes these, for another run."""
        for attributes in self._attributes:
            attributes.restore()
        with torch.no_grad():
            for values in (*self._values, *self._parameters):
                values.restore()
        for parameter, _ in self._gradients:
            parameter.grad = None
        for generator, state in self._generators:
            generator.set_state(state)
        self._random.restore()

    def restore(self) -> None:
        """Restores everything."""
        self.restart()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for parameter, learns in self._learns:
            if parameter.requires_grad is not learns:
                parameter.requires_grad_(learns)
        for hooks, those in self._hooks:
            hooks.update(those)


class _Attributes:
    """The attributes of a module, and the contents of its containers: caches, counters, buffers by name."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._values = dict(vars(module))
        self._contents = [
            (value, value.copy()) for value in self._values.values() if type(value) in _CONTAINERS
        ]

    def restore(self) -> None:
        own = vars(self._module)
        for name in own.keys() - self._values.keys():
            del own[name]
        for name, value in self._values.items():
            if own.get(name) is not value:
                own[name] = value
        for container, content in self._contents:
            if len(container) == len(content) and all(map(_is, _flat(container), _flat(content))):
                continue
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(content)


def _is(a: object, b: object) -> bool:
    return a is b


def _flat(container: Any) -> Iterable[Any]:
    if isinstance(container, dict):
        return [each for item in container.items() for each in item]
    return container  # type: ignore[no-any-return]


class _Values:
    """The values of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._data = tensor, tensor.detach()
        self._values = self._data.clone()

    def is_same(self) -> bool:
        """Whether the tensor was not written to."""
        now, then = self._tensor.detach(), self._data
        return now.data_ptr() == then.data_ptr() and _is_same(now, self._values)

    def restore(self) -> None:
        """Restores the values, without a write if they are unchanged."""
        if self.is_same():
            return
        if self._tensor.data_ptr() != self._data.data_ptr():
            self._tensor.data = self._data
        self._tensor.detach().copy_(self._values)


def _is_lazy(module: nn.Module) -> bool:
    """Whether a first run creates parameters, which are kept."""
    return any(map(nn.parameter.is_lazy, (*module.parameters(), *module.buffers())))


def _is_kept(tensor: Tensor) -> bool:
    is_plain = type(tensor) in PLAIN_TENSORS or isinstance(tensor, nn.Buffer)
    return is_plain and is_dense(tensor) and not tensor.is_meta


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype is b.dtype and torch.equal(a, b)


def _leaves(scalars: Iterable[Tensor]) -> Iterable[Tensor]:
    """Returns the tensors that would get gradients in a backward."""
    rest: list[Any] = [node_of(each) for each in scalars]
    seen: set[Any] = set()
    while rest:
        node = rest.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        rest += [each for each, _ in edges_of(node)]


@contextlib.contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """Restores on exit the state of a model, or of everything that a function runs, and the RNG state."""
    state = ModelState(reached_by(model), ())
    try:
        yield
    finally:
        state.restore()
