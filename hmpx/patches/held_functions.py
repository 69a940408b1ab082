"""Keeps torch's functions usable in torch.fx graphs and in class bodies, across conversions.

A node stores torch's own function. While torch is converted, `Node.target` returns the wrapper instead.
So a program can call a node's function, or compare it with torch's, no matter when the graph was traced.

A Python function in a class body becomes a method, and a builtin does not. Wrappers are Python functions,
so those of builtins are made static methods.
"""

from __future__ import annotations

import dataclasses
import functools
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
    """Yields the patches of nodes, and of the creation of subclasses of `torch.nn.Module`."""
    slot = Patch(nn.Module, "__init_subclass__", None)
    yield dataclasses.replace(slot, value=classmethod(_unbinding(draft.read(slot))))
    if NODE_TARGET is not None:
        yield from _node_patches(draft, replacements)


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


def _node_patches(draft: Draft, replacements: Mapping[int, Callable[..., Any]]) -> Iterator[Patch]:
    """Yields the patches of nodes' targets, and of the search for nodes by target."""
    wrappers = {
        address: wrapper
        for address, wrapper in replacements.items()
        if isinstance(vars(wrapper)["__wrapped__"], _FUNCTIONS)
    }
    full = draft.attribute(torch, "full")  # as patched: it clamps numbers
    wrappers[id(unwrapped(full))] = full
    get, put = NODE_TARGET.__get__, NODE_TARGET.__set__
    key = draft.attribute(NODE_TABLE, NODE_KEY)
    find, init = draft.attribute(fx.Graph, "find_nodes"), draft.attribute(fx.Node, "__init__")

    def read(self: fx.Node) -> Any:
        target = get(self)
        return wrappers.get(id(target), target)

    def write(self: fx.Node, target: Any) -> None:
        put(self, unwrapped(target))

    @functools.wraps(init)
    def make(
        self: fx.Node, graph: Any, name: Any, op: Any, target: Any, *args: Any, **kwargs: Any
    ) -> None:
        init(self, graph, name, op, unwrapped(target), *args, **kwargs)

    @functools.wraps(find)
    def find_nodes(self: fx.Graph, *, op: str, target: Any = None, **kwargs: Any) -> Any:
        return find(self, op=op, target=unwrapped(target), **kwargs)

    @functools.wraps(key)
    def key_of(self: Any, node: fx.Node) -> Any:
        op, target = key(self, node)
        return op, unwrapped(target)

    yield Patch(fx.Node, "target", property(read, write))
    yield Patch(fx.Node, "__init__", make)
    yield Patch(fx.Graph, "find_nodes", find_nodes)
    yield Patch(NODE_TABLE, NODE_KEY, key_of)
