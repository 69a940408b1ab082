"""Saves and restores the state that runs of a model change; finds the modules that a function runs."""

from __future__ import annotations

import collections
import contextlib
import functools
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from copyreg import _slotnames  # type: ignore[attr-defined]
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ..errors import to_the_end
from ..places import PACKAGE
from ..tensors import edges_of, is_leaf, leaves, node_of, tensors_in
from ..torch_internals import DisableTorchFunctionSubclass, FakeTensor
from .disabling import apart
from .module_names import named_tensors


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
        for set_state, state in self.states:
            set_state(*state)


def accelerators() -> set[torch.device]:
    """Returns all accelerators, if the program uses any."""
    found = torch.accelerator.current_accelerator()
    if found is None or not getattr(torch.get_device_module(found), "is_initialized", bool)():
        return set()
    return {torch.device(found.type, index) for index in range(torch.accelerator.device_count())}


def state_of_random_numbers(values: Iterable[Any]) -> RandomStates:
    """Returns torch's RNG state for calls with these arguments, with that of generators among them."""
    values = leaves(values)
    found = RandomStates({tensor.device for tensor in tensors_in(values)}, of_torch_alone=True)
    generators = [each for each in values if isinstance(each, torch.Generator)]
    found.states += [(each.set_state, (each.get_state(),)) for each in generators]
    return found


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
    kinds = (
        nn.Module, torch.Generator, functools.partial, types.MethodType, types.FunctionType, list, tuple, dict
    )  # fmt: skip
    return isinstance(value, kinds)


#: Containers whose contents are restored, derived ones first.
_CONTAINERS: Final = (collections.OrderedDict, dict, list, set, collections.deque, bytearray)

#: Values without contents.
_ATOMS: Final = frozenset({bool, int, float, str, type(None), types.FunctionType, torch.Size})

#: Users' hooks on finished gradients, such as those that step an optimizer.
_FINISHED: Final = "_post_accumulate_grad_hooks"

_ABSENT: Final = object()


class ModelState:
    """All that a run of a model can change.

    That is what modules, inputs and other objects hold, in attributes and containers, down to the bits of
    tensors; gradients, hooks, generators, and the states of random numbers.
    """

    def __init__(self, model: Any, *inputs: Any, but: Iterable[Tensor] = ()) -> None:
        """Saves the state; the caller restores the values of the tensors ``but``."""
        self._undo: list[Callable[[], object]] = []
        self._gradients: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._but = {id(each) for each in but}
        with _apart():
            reached = reached_by(model, *inputs)
            scripted = [[*named_tensors(each)] for each in reached.modules]  # in no attribute
            seen = self._saved([scripted, *reached, model, *inputs])
            self.tensors = [each for each in seen if isinstance(each, Tensor)]
            devices = {each.device for each in self.tensors if not isinstance(each, FakeTensor)}
            random_states = RandomStates(devices | accelerators())
        self._undo += [functools.partial(put, *state) for put, state in random_states.states]

    def keep_gradients(self, scalars: Iterable[Tensor]) -> None:
        """Saves and removes the gradients of other tensors that a backward of ``scalars`` reaches."""
        for leaf in _leaves(scalars):
            if id(leaf) not in self._gradients:
                self._gradients[id(leaf)] = leaf, leaf.grad
                leaf.grad = None

    def restart(self) -> None:
        """Restores everything, and removes gradients and hooks on finished ones, for another run."""
        self.restore()
        for tensor, _ in self._gradients.values():
            tensor.grad = None
            (getattr(tensor, _FINISHED, None) or {}).clear()

    def restore(self) -> None:
        """Restores everything, even if it is interrupted."""
        to_the_end(self._restore)

    def _restore(self) -> None:
        with _apart():
            for undo in self._undo:
                undo()
            for tensor, gradient in self._gradients.values():
                if tensor.grad is not gradient:
                    tensor.grad = gradient

    def _saved(self, roots: Iterable[Any]) -> list[Any]:
        seen: dict[int, Any] = {}
        rest = list(roots)
        while rest:
            value = rest.pop()
            if type(value) not in _ATOMS and id(value) not in seen:
                seen[id(value)] = value
                rest += self._parts(value)
        return list(seen.values())

    def _parts(self, value: Any) -> Iterator[Any]:
        """Saves a value without its parts, and yields these."""
        kind = next((each for each in _CONTAINERS if isinstance(value, each)), None)
        if isinstance(value, Tensor):
            yield from self._tensor_parts(value)
        elif kind is not None:
            items = _items(value, kind)
            self._undo.append(functools.partial(_refill, value, kind, items))
            yield from items
        elif isinstance(value, (tuple, frozenset)):
            yield from value
            return
        elif (undo := _undo_of_data(value)) is not None:
            self._undo.append(undo)
        elif isinstance(value, (functools.partial, types.MethodType)):
            yield from _held(value)
        elif not _is_entered(value):
            return
        if kind is not type(value):
            slots = {name: getattr(value, name, _ABSENT) for name in _slotnames(type(value))}
            self._undo.append(functools.partial(_reset, value, type(value), slots))
            yield from slots.values()
            yield getattr(value, "__dict__", None)

    def _tensor_parts(self, tensor: Tensor) -> Iterator[Any]:
        learns = tensor.requires_grad if is_leaf(tensor) else None
        if learns is not None:
            self._gradients[id(tensor)] = tensor, tensor.grad
            yield tensor.grad
        hooks = [getattr(tensor, name, None) for name in ("_backward_hooks", _FINISHED)]
        yield from hooks
        # Tensors of other classes keep their values in attributes.
        is_own = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
        data = tensor.detach() if is_own else None
        self._undo.append(functools.partial(_reset_tensor, tensor, data, learns, hooks))
        if data is not None and id(tensor) not in self._but and not data.is_meta:
            self._undo.append(_undo_of_writes(tensor, data))


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    with torch.inference_mode(False), apart(), DisableTorchFunctionSubclass():
        yield


def _is_entered(value: Any) -> bool:
    """Whether attributes of an object are restored: not those of queues, loggers, compilers and data sets."""
    module = type(value).__module__
    top = module.partition(".")[0]
    is_of_torch = top == "torch" and "._" in module
    if is_of_torch or top == PACKAGE or top in sys.stdlib_module_names:
        return isinstance(value, (nn.Module, types.SimpleNamespace))
    return not isinstance(value, (type, Dataset, DataLoader))


def _reset(value: Any, kind: type, slots: Mapping[str, Any]) -> None:
    if type(value) is not kind:  # lazy modules and parametrized ones change their class
        value.__class__ = kind
    for name, content in slots.items():
        if content is _ABSENT and hasattr(value, name):
            object.__delattr__(value, name)
        elif content is not getattr(value, name, _ABSENT):
            object.__setattr__(value, name, content)


def _items(container: Any, kind: Any) -> list[Any]:
    """Returns a container's items; for a mapping all keys, then all values."""
    is_mapping = issubclass(kind, dict)
    return [*kind.__iter__(container), *(kind.values(container) if is_mapping else ())]


def _refill(container: Any, kind: Any, items: list[Any]) -> None:
    if list(map(id, _items(container, kind))) == list(map(id, items)):
        return
    kind.clear(container)
    if issubclass(kind, dict):
        half = len(items) // 2
        for key, value in zip(items[:half], items[half:], strict=True):
            kind.__setitem__(container, key, value)
    else:
        (kind.update if kind is set else kind.extend)(container, items)


def _undo_of_data(value: Any) -> Callable[[], object] | None:
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.random.RandomState):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, (numpy.random.Generator, numpy.random.BitGenerator)):
        bits = getattr(value, "bit_generator", value)
        return functools.partial(setattr, bits, "state", bits.state)
    if isinstance(value, numpy.ndarray) and not isinstance(value, numpy.memmap):
        return functools.partial(_refill_array, value, value.copy())
    return None


def _refill_array(array: Any, items: Any) -> None:
    if array.tobytes() != items.tobytes():
        array[...] = items


def _reset_tensor(tensor: Tensor, data: Any, learns: bool | None, hooks: list[Any]) -> None:
    if data is not None:
        tensor.data = data  # the shape, the strides and the memory
    if learns is not None and not is_leaf(tensor) and not tensor._is_view():
        tensor.detach_()  # a value that depends on parameters was written to it
    if learns is not None and tensor.requires_grad is not learns and is_leaf(tensor):
        tensor.requires_grad_(learns)
    for name, before in zip(("_backward_hooks", _FINISHED), hooks, strict=True):
        if before is None and (added := getattr(tensor, name, None)):
            added.clear()


def _undo_of_writes(tensor: Tensor, data: Tensor) -> Callable[[], object]:
    if data.layout is not torch.strided:  # its memory is not accessible
        return functools.partial(_replace, tensor, data.clone(), tensor._version)
    storage = data.untyped_storage()
    if not storage.data_ptr():
        return functools.partial(_rewrite, data, data.clone(), 0)
    start, count = 0, int(storage.nbytes())
    if not data.is_nested:
        steps = [(n - 1) * step for n, step in zip(data.shape, data.stride(), strict=True)]
        start = int(data.storage_offset()) * data.itemsize
        count = (sum(steps) + 1) * data.itemsize if data.numel() else 0
    # Bits, in the largest numbers that fit. To autograd, a write to them is not one to the tensor.
    dtype, size = (torch.uint8, 1) if (start | count) % 8 else (torch.int64, 8)
    bits = torch.empty(0, dtype=dtype, device=data.device)
    bits.set_(storage, start // size, (count // size,), (1,))
    return functools.partial(_rewrite, bits, bits.clone(), start + count)


def _rewrite(now: Tensor, then: Tensor, end: int) -> None:
    """Restores values, without a write if they are unchanged."""
    if end > (storage := now.untyped_storage()).nbytes():
        storage.resize_(end)
    if not torch.equal(now, then):
        now.copy_(then)


def _replace(tensor: Tensor, then: Tensor, version: int) -> None:
    if tensor._version != version:
        tensor.data = then.clone()


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
def unchanged(model: Any, *inputs: Any, but: Iterable[Tensor] = ()) -> Iterator[ModelState]:
    """Restores on exit all that runs of a model with these inputs change; yields the state before."""
    state = ModelState(model, *inputs, but=but)
    learns, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    try:
        # Its end restores whether gradients are recorded, and torch.autocast is on.
        with torch.inference_mode(torch.is_inference_mode_enabled()):
            torch.set_grad_enabled(learns)
            yield state
    finally:
        state.restore()
        torch.set_default_dtype(dtype)
