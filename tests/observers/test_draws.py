"""Calls that observers repeat draw no random number of the program's."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor
from torch.nn import functional as F

import hmpx
from hmpx import ops

DRAWS: dict[str, Callable[[Generator], Tensor]] = {
    "bernoulli": lambda g: torch.bernoulli(torch.full((5,), 0.4), generator=g),
    "bernoulli_": lambda g: torch.zeros(5).bernoulli_(torch.full((5,), 0.4), generator=g),
    "binomial": lambda g: torch.binomial(torch.full((5,), 9.0), torch.full((5,), 0.4), generator=g),
    "dropout": lambda g: F.dropout(torch.ones(9)),
    "dropout2d": lambda g: F.dropout2d(torch.ones(1, 9, 2, 2)),
    "fractional_max_pool2d": lambda g: F.fractional_max_pool2d(
        torch.arange(64.0).view(1, 1, 8, 8), 2, 4
    ),
    "gumbel_softmax": lambda g: F.gumbel_softmax(torch.arange(9.0)),
    "multinomial": lambda g: torch.multinomial(torch.ones(5), 3, generator=g).float(),
    "normal": lambda g: torch.normal(torch.ones(5), torch.ones(5), generator=g),
    "poisson": lambda g: torch.poisson(torch.ones(5), generator=g),
    "rand_like": lambda g: torch.rand_like(torch.zeros(4)),
    "rrelu": lambda g: F.rrelu(-torch.ones(9), training=True),
    "uniform_": lambda g: torch.zeros(4).uniform_(generator=g),
}


def repeat(call: hmpx.OpCall, tensors: hmpx.CallTensors | None) -> None:
    """Runs a call again, in each way."""
    if tensors is not None:
        tensors.in_fp32()
        tensors.run(*tensors.given, **tensors.given_kwargs)
        tensors.run_cast(*tensors.given, **tensors.given_kwargs)


OBSERVERS: dict[str, Callable[[Path], AbstractContextManager[Any]]] = {
    "attach": lambda path: hmpx.attach(repeat, tensors=True, every_op=True),
    "lint": lambda path: hmpx.lint(),
    "record": lambda path: hmpx.record(memory=True),
    "trace": lambda path: hmpx.trace(path / "a.hmpx"),
    "watch": lambda path: hmpx.watch(mode="collect", underflow=True),
}


def numbers(draw: Callable[[Generator], Tensor]) -> list[Tensor]:
    """Returns what a call draws, and the next numbers of the generator and of torch's own."""
    torch.manual_seed(7)
    generator = Generator().manual_seed(3)
    return [draw(generator), torch.rand(3, generator=generator), torch.rand(3)]


@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("is_converted", [False, True])
def test_the_next_numbers_are_the_same(is_converted: bool, observer: str, tmp_path: Path) -> None:
    """Of the program's own generator, and of torch's."""
    if is_converted:
        hmpx.convert(device_types={"cpu"})
    for name, draw in DRAWS.items():
        expected = numbers(draw)
        with OBSERVERS[observer](tmp_path):
            found = numbers(draw)
        assert all(map(torch.equal, found, expected)), name


def test_invariance_leaves_generators() -> None:
    """Also one that no attribute of the model holds."""

    def noisy(x: Tensor) -> Tensor:
        generator = Generator().manual_seed(3)
        y = x * torch.normal(torch.ones(2), torch.ones(2), generator=generator)
        kept.append(torch.rand(3, generator=generator))
        return y

    kept: list[Tensor] = []
    noisy(torch.ones(4, 2))
    hmpx.invariance(noisy, torch.ones(4, 2))
    assert len(kept) > 1
    assert all(torch.equal(each, kept[0]) for each in kept)


def test_python_functions_that_draw_are_known() -> None:
    """Those whose code, or code that it calls in its module, names a function that draws.

    torch's tags are compared by `test_missing_kernels`.
    """
    known = {*ops.facts("random"), "rand", "randn", "randint", "randperm"}

    def draws(function: Any, seen: set[types.CodeType]) -> bool:
        function = inspect.unwrap(function)
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType) or function.__code__ in seen:
            return False
        seen.add(function.__code__)
        codes, names = [function.__code__], set[str]()
        while codes:  # nested functions too
            code = codes.pop()
            names.update(each.removesuffix("_") for each in code.co_names)
            codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        if names & known:
            return True
        called = [function.__globals__.get(each) for each in function.__code__.co_names]
        of_classes = [vars(each).values() for each in called if isinstance(each, type)]
        module = function.__module__
        called += [each for values in of_classes for each in values]
        return any(draws(f, seen) for f in called if getattr(f, "__module__", None) == module)

    found = {
        name
        for name, op in ops.table().items()
        for site in op.sites
        if draws(getattr(site.owner, site.attribute), set())
    }
    assert found >= {"gumbel_softmax", "dropout2d", "lobpcg"}
    assert all(map(ops.draws, found))
