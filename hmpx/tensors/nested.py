"""Arguments and results of calls: tensors, and lists and tuples of them at any depth."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from ..errors import raised_here
from ..torch_internals import (
    TRACES_COPIES,
    dispatch_modes,
    is_graph_made,
    is_jit_tracing,
    transforms,
)

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
