"""An observer changes nothing: every result has the bits that it has without one."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hmpx


@contextlib.contextmanager
def attached(**options: bool) -> Iterator[None]:
    found = hmpx.attach(lambda *call: None, **options)
    try:
        yield
    finally:
        found.detach()


OBSERVERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "record": hmpx.record,
    "watch": lambda: hmpx.watch(mode="collect"),
    "attach": attached,
    "attach tensors": lambda: attached(tensors=True),
}


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def nested_autocast() -> Iterator[None]:
    outer, off = torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False)
    with outer, off, torch.autocast("cpu", torch.float16):
        yield


AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
    "autocast nested": nested_autocast,
    "function mode": FunctionMode,
    "dispatch mode": DispatchMode,
    "device": lambda: torch.device("cpu"),
    "no_grad": torch.no_grad,
    "casts off": hmpx.disable_casts,
}


class Model(nn.Module):
    """Products, a norm, a power, an operator, in-place updates, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x)) @ self.first.weight.t()
        y = nn.functional.dropout(y**2 + torch.matmul(x, x.mT @ x), 0.2)
        y += x
        return self.last(y).softmax(-1)


def plain(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def in_checkpoint(model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=False)  # type: ignore[no-any-return]


def in_reentrant_checkpoint(model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=True)  # type: ignore[no-any-return]


def in_vmap(model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: model(row[None])[0], randomness="different")(x)


def results(run: Callable[[nn.Module, Tensor], Tensor]) -> list[Tensor]:
    """Returns output and gradients of a step, with the loss's backward outside of any region."""
    torch.manual_seed(3)
    model, x = Model(), torch.randn(6, 8, requires_grad=True)
    y = run(model, x)
    if y.requires_grad:
        y.float().square().sum().backward()
    gradients = [p.grad for p in [x, *model.parameters()] if p.grad is not None]
    return [y.detach(), *gradients]


def assert_same(actual: list[Tensor], expected: list[Tensor], name: str) -> None:
    assert [t.dtype for t in actual] == [t.dtype for t in expected], name
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def converted(is_converted: bool) -> AbstractContextManager[Any]:
    """Converts, or leaves torch as it is."""
    return hmpx.convert(device_types={"cpu"}) if is_converted else nullcontext()


RUNS = [plain, in_checkpoint, in_reentrant_checkpoint, in_vmap]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("is_converted", [False, True])
def test_an_observer_changes_no_bit(
    is_converted: bool, around: str, run: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    """Whatever surrounds the step."""
    with converted(is_converted), AROUND[around]():
        expected = results(run)
    for name, observe in OBSERVERS.items():
        with converted(is_converted), observe(), AROUND[around]():
            assert_same(results(run), expected, name)
        with converted(is_converted), AROUND[around](), observe():
            assert_same(results(run), expected, f"{name} inside")


@pytest.mark.sampled(24)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("is_converted", [False, True])
def test_a_tool_changes_no_bit(
    is_converted: bool, around: str, run: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    """Neither of what is computed after it, nor, where it calls the program once, of that."""
    kept: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        torch.manual_seed(5)
        kept.append(run(model, x))
        return kept[-1]

    torch.manual_seed(3)
    model, x = Model(), torch.randn(6, 8, requires_grad=True)
    with converted(is_converted), AROUND[around]():
        expected = results(run)
        with torch.enable_grad():
            function(x)
    tools: dict[str, Callable[[], object]] = {
        "draw": lambda: hmpx.draw(function, x),
        "explain": lambda: (hmpx.explain("linear"), str(hmpx.explain("*norm*"))),
        "plan": lambda: hmpx.plan(model, x, device="cpu"),
        "compare": lambda: hmpx.compare(model, x),
    }
    before = [p.detach().clone() for p in model.parameters()]
    for name, tool in tools.items():
        with converted(is_converted), AROUND[around]():
            state = torch.get_rng_state()
            with contextlib.suppress(hmpx.OptionError):  # compare: casts are off
                tool()
            if name != "draw":  # which calls a function of the program
                assert torch.equal(torch.get_rng_state(), state), name
            assert_same(results(run), expected, name)
    assert_same([*model.parameters()], before, "parameters")
    assert_same(kept[1:], kept[:1], "inside draw")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("run", RUNS[:2])
@pytest.mark.parametrize("around", AROUND)
def test_the_log_changes_no_bit(
    around: str,
    run: Callable[[nn.Module, Tensor], Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It observes a conversion."""
    caplog.set_level(logging.INFO, "hmpx")
    found = []
    for verbose in (False, True):
        session = hmpx.convert(device_types={"cpu"}, isVerbose=verbose)
        with session, AROUND[around](), contextlib.redirect_stdout(io.StringIO()):
            found.append(results(run))
    assert_same(found[1], found[0], "the log")


@pytest.mark.parametrize(
    "enter",
    [
        lambda: hmpx.record(memory=True),
        lambda: hmpx.lint(every=1),
        lambda: hmpx.watch("collect", underflow=True),
        lambda: hmpx.expect({"expect": [{"module": "*", "saved": "float32"}]}, mode="collect"),
    ],
    ids=["record", "lint", "watch", "contract"],
)
def test_writes_to_lists_of_tensors_are_counted(enter: Any) -> None:
    """Below a dispatch mode torch counts none, and autograd would use what was written."""
    weight, value = torch.full((3,), 2.0, requires_grad=True), torch.ones(3)
    with enter():
        product = (weight * value).sum()
        torch._foreach_add_([value], 5.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
        torch._foreach_add_([value], [value])
    assert value._version == 2


def test_the_memory_of_jagged_tensors_is_recorded() -> None:
    """Asked for its node inside of a call, such a tensor never answers."""
    parts = [torch.randn(2, 4), torch.randn(3, 4)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    with hmpx.record(memory=True):
        y = torch.nn.Linear(4, 4)(x)
    assert y.shape[-1] == 4
