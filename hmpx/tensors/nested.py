"""Arguments and results of calls, inputs and outputs of models: tensors, and containers of them at any depth."""

from __future__ import annotations

import copy
import dataclasses
import enum
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ..errors import raised_here, shown
from ..torch_internals import (
    TRACES_COPIES,
    dispatch_modes,
    is_graph_made,
    is_jit_tracing,
    transforms,
)
from .dtypes import LOW_DTYPES

#: A function of torch, of a program, or a wrapper of one.
Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_T = TypeVar("_T")

SEQUENCES: Final = (list, tuple)

#: Classes of tensors that only torch's own kernels compute with.
PLAIN_TENSORS: Final = frozenset({Tensor, torch.nn.Parameter})

#: Layouts of tensors that store only some of their elements.
SPARSE: Final = frozenset(
    {
        torch.sparse_coo,
        torch.sparse_csr,
        torch.sparse_csc,
        torch.sparse_bsr,
        torch.sparse_bsc,
    }
)

#: Classes of non-tensor arguments that don't affect dtypes.
NUMBERS: Final = frozenset({type(None), int, float, bool, complex})


def leaves(values: Iterable[Any]) -> list[Any]:
    """Returns ``values`` flattened: lists and tuples are replaced by their contents."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, SEQUENCES):
            found.extend(leaves(value))
        else:
            found.append(value)
    return found


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, SEQUENCES):
            found += tensors_in(value)
    return found


def is_floating(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def floating_in(values: Iterable[Any]) -> list[Tensor]:
    """Returns the floating-point and complex tensors among ``values``, also inside lists and tuples."""
    return [t for t in tensors_in(values) if t.dtype.is_floating_point or t.dtype.is_complex]


def map_tensors(value: _T, function: Callable[[Tensor], Any]) -> _T:
    """Returns ``value`` with each tensor in it replaced by the result of ``function``.

    A list or tuple in which nothing changes is returned as the same object.
    """
    if isinstance(value, Tensor):
        return function(value)  # type: ignore[no-any-return]
    if isinstance(value, SEQUENCES):
        items = [map_tensors(item, function) for item in value]
        if all([new is old for new, old in zip(items, value, strict=True)]):  # noqa: C419  # twice as fast
            return value
        return with_items(value, items)  # type: ignore[no-any-return]
    return value


def with_items(sequence: Any, items: list[Any]) -> Any:
    """Returns a list or tuple that holds ``items``, with the class and attributes of ``sequence``.

    Classes written in Python may have constructors with any signature, so those are not called.
    """
    cls: Any = type(sequence)
    if cls is list:
        return items
    if cls is tuple:
        return tuple(items)
    if isinstance(sequence, list):
        made: Any = list.__new__(cls)
        list.extend(made, items)  # torch.fx's lists reject modification
    elif hasattr(sequence, "_make"):  # named tuples
        is_traced = not TRACES_COPIES and torch.compiler.is_dynamo_compiling()
        made = cls(*items) if is_traced else cls._make(items)
    elif cls.__new__ is tuple.__new__ or isinstance(cls.__new__, types.FunctionType):
        made = tuple.__new__(cls, items)
    else:
        made = cls(items)  # torch.return_types and torch.Size are made from one sequence
    if cls.__dictoffset__:  # its instances have attributes
        vars(made).update(vars(sequence))
    return made


def version_of(tensor: Tensor) -> int:
    """Returns how often a tensor was written to; -1 for tensors made in inference mode, where torch does not count."""
    return -1 if tensor.is_inference() else tensor._version


#: The key under which a node's metadata holds the nodes before it.
_BEFORE: Final = "hmpx.before"


def node_of(tensor: Tensor) -> Any:
    """Returns the autograd node that created a tensor, or None.

    Torch raises an error for a view made without gradients whose base was written to: this returns None.
    """
    try:
        node = tensor.grad_fn
    except raised_here(RuntimeError):
        return None
    if node is not None:
        edges_of(node)
    return node


def edges_of(node: Any) -> tuple[tuple[Any, int], ...]:
    """Returns a node's edges: the nodes before it, or None, and which of their outputs it takes.

    From then on the node's metadata holds the edges. Torch frees nodes that Python has seen recursively, which
    overflows the stack for chains of thousands. Python limits the recursion for its own containers.
    """
    edges: tuple[tuple[Any, int], ...] = node.next_functions
    if edges:
        node.metadata[_BEFORE] = edges
    return edges


def is_leaf(tensor: Tensor) -> bool:
    """Whether no operation known to autograd created a tensor; False for a view without this information."""
    try:
        return tensor.is_leaf
    except raised_here(RuntimeError):
        return False


class Constant:
    """A constant tensor, on each device that needs it; ``make`` returns a new one."""

    def __init__(self, make: Callable[[torch.device], Tensor]) -> None:
        self._make = make
        self._made: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """Returns the tensor on ``device``; it must not be written to.

        While a graph is traced, the graph creates a new tensor. A new one is also created where modes
        and transforms may wrap new tensors.
        """
        if torch.compiler.is_dynamo_compiling() or is_graph_made() or is_jit_tracing():
            return self._make(device)
        found = self._made.get(device)
        if found is not None:
            return found
        if dispatch_modes() or transforms() is not None:
            return self._make(device)
        with torch.inference_mode(False):
            made = self._make(device)
        return self._made.setdefault(device, made)  # another thread may have been faster


def stored_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that a module holds, each once, where `parameters()` may give upcast values."""
    return [each for _, each in nn.Module.named_parameters(module)]


def tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, SEQUENCES):
        for each in value:
            yield from tensors_of(each)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_of(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name, None))


def floats_of(value: Any) -> list[Tensor]:
    """Returns the dense real floating-point tensors in ``value`` that have elements."""
    return [
        each
        for each in tensors_of(value)
        if each.dtype.is_floating_point and is_dense(each) and each.numel()
    ]


def is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def map_all(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Returns a model's input with each tensor replaced by the result of ``function``."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, SEQUENCES):
        return with_items(value, [map_all(each, function) for each in value])
    if isinstance(value, Mapping):
        result: Any = copy.copy(value)
        for name, each in value.items():
            result[name] = map_all(each, function)
        return result
    return value


def copied(value: Any) -> Any:
    """Returns ``value`` with copies of its tensors, to which the model may write."""
    return map_all(value, lambda each: each.detach().clone().requires_grad_(each.requires_grad))


def widened(value: Any) -> Any:
    """Returns ``value`` with all low-precision tensors upcast; the same object if there are none."""
    # Torch 2.11 can't compile `is` between lists.
    if not any([each.dtype in LOW_DTYPES for each in tensors_of(value)]):  # noqa: C419
        return value
    if isinstance(value, Tensor):
        return value.float()
    if isinstance(value, SEQUENCES):
        return with_items(value, [widened(item) for item in value])
    if not (isinstance(value, dict) or dataclasses.is_dataclass(value)):
        return value
    if isinstance(value, dict):
        result: Any = dict(value) if type(value) is dict else copy.copy(value)
        for key, item in list(value.items()):
            result[key] = widened(item)
        return result
    is_traced = not TRACES_COPIES and torch.compiler.is_dynamo_compiling()
    result = object.__new__(type(value)) if is_traced else copy.copy(value)
    for name in [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]:
        object.__setattr__(result, name, widened(getattr(value, name)))  # the class may be frozen
    return result


# --- the parts of a model's output, each with its place, as comparable values --------------------

#: Values that `==` compares.
_PLAIN: Final = (
    bool, int, float, complex, str, bytes, type(None), enum.Enum, range, slice,
    torch.dtype, torch.device, torch.layout, type, FunctionType, ModuleType,
)  # fmt: skip


class Opaque(NamedTuple):
    """Stands for a value that can't be compared."""

    said: str


class Part(NamedTuple):
    """A part of a model's output.

    Attributes:
        where: Its place, such as ``"['logits']"``; empty for the whole output.
        value: A dense tensor of floating-point numbers of at least 32 bits, or of integers or bools; a
            number or another value that `==` compares; or an `Opaque`.
    """

    where: str
    value: Any

    @property
    def is_floating(self) -> bool:
        return isinstance(self.value, Tensor) and self.value.dtype.is_floating_point


def floating_parts(parts: Iterable[Part]) -> dict[str, Tensor]:
    """Returns the floating-point tensors among ``parts`` by place, or Python's floats if there are none."""
    parts = list(parts)
    return {each.where: each.value for each in parts if each.is_floating} or {
        each.where: torch.tensor(each.value, dtype=torch.float64)
        for each in parts
        if isinstance(each.value, float)
    }


def parts_of(value: Any, where: str = "", around: tuple[int, ...] = ()) -> Iterator[Part]:
    """Yields the parts of a model's output, whose place is ``where``. Gradients flow through to it.

    ``around`` has the ``id`` of its containers: objects may refer to each other.
    """
    if id(value) in around:
        return
    around = (*around, id(value))
    if isinstance(value, Tensor):
        yield from _parts_of_tensor(value, where)
    elif isinstance(value, complex):
        yield Part(f"{where}.real", value.real)
        yield Part(f"{where}.imag", value.imag)
    elif isinstance(value, _PLAIN):
        yield Part(where, value)
    elif isinstance(value, tuple) and (names := getattr(value, "_fields", None)):
        for name, each in zip(names, value, strict=True):
            yield from parts_of(each, f"{where}.{name}", around)
    elif isinstance(value, (*SEQUENCES, deque)):
        for index, each in enumerate(value):
            yield from parts_of(each, f"{where}[{index}]", around)
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from parts_of(each, f"{where}[{name!r}]", around)
    elif hasattr(value, "__array__") or hasattr(value, "__array_interface__"):
        yield from _parts_of_array(value, where)
    elif names := _names_of(value):
        for name in names:
            yield from parts_of(getattr(value, name, None), f"{where}.{name}", around)
    else:
        yield Part(where, Opaque(shown(value)))


def _names_of(value: Any) -> list[str]:
    """Returns the names of the attributes of ``value``; those of an `nn.Module` are not outputs."""
    if isinstance(value, torch.nn.Module):
        return []
    fields = (
        [each.name for each in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    )
    return list(dict.fromkeys([*fields, *getattr(value, "__dict__", ())]))


def _parts_of_tensor(tensor: Tensor, where: str) -> Iterator[Part]:
    if tensor.is_nested:
        for index, each in enumerate(tensor.unbind()):
            yield from _parts_of_tensor(each, f"{where}[{index}]")
        return
    try:
        dense = _dense(tensor)
    except raised_here(RuntimeError):  # also NotImplementedError: torch can't convert it
        dense = None
    if dense is None:
        yield Part(where, Opaque(f"a tensor of {tensor.dtype} on {tensor.device}"))
    elif dense.numel():
        yield Part(where, dense)


def _dense(tensor: Tensor) -> Tensor | None:
    if tensor.is_meta:
        return None
    if tensor.is_quantized:
        return tensor.dequantize()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype.is_floating_point:
        return tensor if tensor.dtype.itemsize >= torch.float32.itemsize else tensor.float()
    return tensor


def _parts_of_array(array: Any, where: str) -> Iterator[Part]:
    numpy: Any = sys.modules.get("numpy")
    try:
        found = torch.from_numpy(numpy.array(array))
    except raised_here(AttributeError, TypeError, ValueError, RuntimeError):  # objects, no numpy
        yield Part(where, Opaque(shown(array)))
        return
    if found.dim() or not isinstance(array, numpy.generic):
        yield from _parts_of_tensor(found, where)
    else:
        yield from parts_of(found.item(), where)
