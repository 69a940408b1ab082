"""Observers of what autograd saves leave its checks and its hooks to the program."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

import hmpx


def contract(dtype: str = "float32") -> hmpx.expect:
    return hmpx.expect({"expect": [{"module": "*", "saved": dtype}]}, mode="collect")


OBSERVERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "contract": contract,
    "record": lambda: hmpx.record(memory=True),
}


@pytest.mark.parametrize("observer", OBSERVERS)
def test_a_write_to_a_saved_tensor_is_an_error(observer: str) -> None:
    """As without the observer; torch checks no versions of what hooks pack."""
    x = torch.zeros(3, requires_grad=True)
    with OBSERVERS[observer]():
        y = x.exp()
        z = y.sum()
        with torch.no_grad():
            y.mul_(5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.backward()


@pytest.mark.parametrize("observer", OBSERVERS)
def test_programs_that_refuse_hooks_run(observer: str) -> None:
    """Transforms of torch.func do, and blocks that disable hooks."""
    x = torch.zeros(3, requires_grad=True)
    with OBSERVERS[observer]():
        gradient = torch.func.grad(lambda x: x.exp().sum())(torch.zeros(3))
        jacobian = torch.func.jacrev(torch.exp)(torch.zeros(2))
        with disable_saved_tensors_hooks("none here"):
            x.exp().sum().backward()
    assert gradient.tolist() == x.grad.tolist() == [1, 1, 1]
    assert jacobian.tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize("observer", OBSERVERS)
def test_hooks_of_the_program_run_as_often(observer: str) -> None:
    """Reading what a node saved unpacks nothing."""
    calls: list[str] = []

    def run() -> list[str]:
        calls.clear()
        x = torch.zeros(3, requires_grad=True)
        with saved_tensors_hooks(
            lambda t: calls.append("pack") or (t,), lambda p: calls.append("unpack") or p[0]
        ):
            y = x.exp() * x
        y.sum().backward()
        return [*calls]

    expected = run()
    with OBSERVERS[observer]():
        assert run() == expected
    assert expected.count("unpack") == 3


class Cube(torch.autograd.Function):
    """Saves its input and the square of it, not its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        square = x * x
        result = square * x
        ctx.save_for_backward(x, square.bfloat16())
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _, square = ctx.saved_tensors
        return 3 * square * gradient


class Cubed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Cube.apply(x)  # type: ignore[no-any-return]


def test_functions_of_the_program_save_too() -> None:
    """Its own, whose calls are not observed."""
    x = torch.ones(5, requires_grad=True)
    with hmpx.record(memory=True) as rec, contract() as seen:
        nn.Sequential(nn.Identity(), Cubed())(x).sum().backward()
    assert dict(rec.memory.saved) == {"bfloat16": 10, "float32": 20}
    (breach,) = seen.breaches
    assert (breach.key, breach.module, breach.found) == ("saved", "1", "bfloat16")


def test_saved_until_the_backward_ran_or_the_graph_is_gone() -> None:
    """The most that is saved at one time."""
    x, kept = torch.ones(100, requires_grad=True), []
    with hmpx.record(memory=True) as rec:
        for _ in range(3):
            kept.append(x.exp())
            kept[-1].sum().backward()
        assert dict(rec.memory.saved) == {"float32": 400}
        for _ in range(3):
            kept.append(x.exp().detach_())
        assert dict(rec.memory.saved) == {"float32": 400}
        y = x.exp()
        z = x.exp()
        y.sum().backward(retain_graph=True)
        assert dict(rec.memory.saved) == {"float32": 800}
        z.sum().backward()
        x.exp(), x.exp()
        assert dict(rec.memory.saved) == {"float32": 800}
        del y


def test_what_was_saved_before_is_not_counted() -> None:
    """Neither by a record nor by a contract."""
    x = torch.ones(100, requires_grad=True)
    y = x.bfloat16().exp()
    with hmpx.record(memory=True) as rec, contract() as seen:
        (y * 2).float().exp().sum().backward()
    assert rec.memory.saved["float32"] == 400
    assert "bfloat16" not in rec.memory.saved
    assert not seen.breaches
