"""An observer changes nothing: every result has the bits that it has without one."""

from __future__ import annotations

import contextlib
import io
import logging
import os
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
from hmpx.ops import facts


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


X, BIG, FP16 = torch.linspace(-2, 2, 8).half(), -1e30, torch.float16
ROWS = torch.tensor([1, 0, 3])


def written(x: Tensor, value: float | Tensor) -> Tensor:
    y = x.clone()
    y[1] = value
    return y


#: Op -> a call with a number that float16 does not hold. torch refuses it, or makes it infinite.
NUMBERS: dict[str, Callable[[], Any]] = {
    "_foreach_add": lambda: torch._foreach_add([X], [X], alpha=BIG),
    "_foreach_clamp_max": lambda: torch._foreach_clamp_max([X], BIG),
    "_foreach_clamp_min": lambda: torch._foreach_clamp_min([X], BIG),
    "_foreach_maximum": lambda: torch._foreach_maximum([X], BIG),
    "_foreach_minimum": lambda: torch._foreach_minimum([X], BIG),
    "_foreach_pow": lambda: torch._foreach_pow([X], -BIG),
    "_foreach_sub": lambda: torch._foreach_sub([X], [X], alpha=BIG),
    "_unsafe_masked_index": lambda: torch.ops.aten._unsafe_masked_index(X, X > 0, [None], BIG),
    "addmv": lambda: torch.addmv(X[:2], X[:4].view(2, 2), X[:2], alpha=BIG),
    "addr": lambda: torch.addr(X[:4].view(2, 2), X[:2], X[:2], alpha=BIG),
    "clamp": lambda: torch.clamp(X, BIG, -BIG),
    "clamp_max": lambda: torch.clamp_max(X, BIG),
    "clamp_min": lambda: torch.clamp_min(X, BIG),
    "constant_pad_nd": lambda: torch.constant_pad_nd(X, (1, 1), BIG),
    "fill": lambda: torch.fill(X, BIG),
    "fill_diagonal": lambda: X.view(2, 4).clone().fill_diagonal_(BIG),
    "full": lambda: torch.full((2,), BIG, dtype=FP16),
    "full_like": lambda: torch.full_like(X, BIG),
    "hardshrink": lambda: nn.functional.hardshrink(X, -BIG),
    "hardtanh": lambda: nn.functional.hardtanh(X, BIG, -BIG),
    "hinge_embedding_loss": lambda: nn.functional.hinge_embedding_loss(X, X.sign(), -BIG),
    "histc": lambda: torch.histc(X, 4, BIG, -BIG),
    "index_add": lambda: torch.index_add(X, 0, ROWS, X[:3], alpha=BIG),
    "index_fill": lambda: torch.index_fill(X, 0, ROWS, BIG),
    "logit": lambda: torch.logit(X, BIG),
    "masked_fill": lambda: torch.masked_fill(X, X > 0, BIG),
    "masked_fill of a tensor": lambda: torch.masked_fill(X, X > 0, torch.tensor(BIG)),
    "nan_to_num": lambda: torch.nan_to_num(X / 0, BIG, BIG, BIG),
    "new_full": lambda: X.new_full((2,), BIG),
    "pad": lambda: nn.functional.pad(X, (1, 1), value=BIG),
    "pad_sequence": lambda: nn.utils.rnn.pad_sequence([X, X[:2]], padding_value=BIG),
    "pow": lambda: torch.pow(X, -BIG),
    "scatter": lambda: torch.scatter(X, 0, ROWS, BIG),
    "setitem": lambda: written(X, BIG),
    "setitem of a tensor": lambda: written(X, torch.tensor(BIG)),
    "softshrink": lambda: nn.functional.softshrink(X, -BIG),
    "threshold": lambda: nn.functional.threshold(X, 0.0, BIG),
    "uniform": lambda: X.clone().uniform_(BIG, 0),
    "where": lambda: torch.where(X > 0, X, BIG),
    "where of a tensor": lambda: torch.where(X > 0, X, torch.tensor(BIG)),
}  # fmt: skip

#: What an fp32 program does not do, and a conversion makes possible.
REFUSED: dict[str, Callable[[], Any]] = {
    "numpy": lambda: str(X.bfloat16().numpy().dtype),
    "gradients": lambda: setattr(nn.Parameter(torch.ones(8)), "grad", X),
    "parameters": lambda: nn.Parameter(X).dtype,
}


def outcomes() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, call in {**NUMBERS, **REFUSED}.items():
        torch.manual_seed(0)
        try:
            found[name] = call()
        except (RuntimeError, TypeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


UNCONVERTED = {
    **OBSERVERS,
    "lint": hmpx.lint,
    "monitor": lambda: hmpx.monitor(on_alarm="collect"),
    "trace": lambda: hmpx.trace(os.devnull),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", UNCONVERTED)
def test_numbers_and_values_that_torch_refuses(name: str) -> None:
    """An observer of a program that is not converted makes nothing finite, and nothing possible."""
    assert {*NUMBERS} >= {*facts("stored_numbers"), *facts("factors")}
    expected = outcomes()
    with UNCONVERTED[name]():
        found = outcomes()
    for each, value in expected.items():
        if isinstance(value, (Tensor, list)):
            torch.testing.assert_close(found[each], value, rtol=0, atol=0, equal_nan=True, msg=each)
        else:
            assert found[each] == value
