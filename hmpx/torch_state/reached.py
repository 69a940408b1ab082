"""What a function runs: modules and generators of random numbers that it holds, directly or in closures."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn


class Reached(NamedTuple):
    """What a function can run.

    Attributes:
        modules: Modules, without those inside them.
        generators: Generators of random numbers.
    """

    modules: tuple[nn.Module, ...]
    generators: tuple[torch.Generator, ...]


def reached_by(model: Callable[..., Any], *inputs: Any) -> Reached:
    """Returns what a model can run: what it holds in attributes, closures, defaults, arguments and globals."""
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
        except ValueError:  # nothing is assigned yet
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
    """Whether something may be found in ``value``."""
    kinds = (
        nn.Module, torch.Generator, functools.partial, types.MethodType, types.FunctionType, list, tuple, dict
    )  # fmt: skip
    return isinstance(value, kinds)
