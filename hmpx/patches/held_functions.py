"""Keeps torch's functions usable in torch.fx graphs and in class bodies, across conversions.

A node stores torch's own function. While torch is converted, `Node.target` returns the wrapper instead.
So a program can call a node's function, or compare it with torch's, no matter when the graph was traced.

A Python function in a class body becomes a method, and a builtin does not. Wrappers are Python functions,
so those of builtins are made static methods.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import fx, nn

from ..patching import ABSENT, Draft, Patch
from ..torch_internals import NODE_KEY, NODE_TABLE, NODE_TARGET
from .compiled import is_wrapper, unwrapped

#: Without ATen's operators: graphs of these hold their casts.
_FUNCTIONS: Final = (types.BuiltinFunctionType, types.FunctionType)


def held_function_patches(
    draft: Draft, replacements: Mapping[int, Callable[..., Any]]
) -> Iterator[Patch]:
    """Yields the patches of subclasses of `torch.nn.Module`, of nodes, and of the search for nodes."""
    slot = Patch(nn.Module, "__init_subclass__", None)
    yield slot._replace(value=classmethod(_unbinding(draft.read(slot))))
    if NODE_TARGET is None:
        return
    wrappers = {
        address: wrapper
        for address, wrapper in replacements.items()
        if isinstance(vars(wrapper)["__wrapped__"], _FUNCTIONS)
    }
    full = draft.attribute(torch, "full")  # as patched: it clamps numbers
    wrappers[id(unwrapped(full))] = full
    get, put = NODE_TARGET.__get__, NODE_TARGET.__set__

    def read(self: fx.Node) -> Any:
        target = get(self)
        return wrappers.get(id(target), target)

    def write(self: fx.Node, target: Any) -> None:
        put(self, unwrapped(target))

    def find(original: Any, graph: fx.Graph, *, target: Any = None, **kwargs: Any) -> Any:
        return original(graph, target=unwrapped(target), **kwargs)

    def key(original: Any, self: Any, node: fx.Node) -> Any:
        op, target = original(self, node)
        return op, unwrapped(target)

    yield Patch(fx.Node, "target", property(read, write))
    yield draft.around(
        fx.Node,
        "__init__",
        lambda original, node, graph, name, op, target, *more, **kwargs: original(
            node, graph, name, op, unwrapped(target), *more, **kwargs
        ),
    )
    yield draft.around(fx.Graph, "find_nodes", find)
    yield draft.around(NODE_TABLE, NODE_KEY, key)


def _unbinding(before: Any) -> Callable[..., None]:
    """Returns an ``__init_subclass__`` that makes wrappers of builtins static methods."""

    def init_subclass(cls: type[nn.Module], /, **kwargs: Any) -> None:
        if before is ABSENT:
            super(nn.Module, cls).__init_subclass__(**kwargs)
        else:
            before.__get__(None, cls)(**kwargs)
        for owner in cls.__mro__[: cls.__mro__.index(nn.Module)]:  # skips mixins
            for name, value in list(vars(owner).items()):
                if isinstance(unwrapped(value), types.BuiltinFunctionType) and is_wrapper(value):
                    setattr(owner, name, staticmethod(value))

    return init_subclass
