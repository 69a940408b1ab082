"""Faults made in `Optimizer.step`: the parameter, its state, the op, and the line that called ``step``."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import hmpx

pytestmark = pytest.mark.usefixtures("no_search_for_early_names")

FP16, FP32 = torch.float16, torch.float32


class Scaled(nn.Module):
    """A model of one weight, whose gradient is its input."""

    def __init__(self, value: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 4), value, dtype=dtype))

    def forward(self, given: Tensor) -> Tensor:
        return (self.weight * given).sum()


def trained(
    make: Callable[[Any], optim.Optimizer],
    gradient: float,
    dtype: torch.dtype = FP32,
    value: float = 0.5,
    steps: int = 1,
) -> hmpx.Watch:
    """Returns a watch of steps with this gradient in each element."""
    with hmpx.watch("collect") as w:
        model = nn.ModuleDict({"inner": Scaled(value, dtype)})
        optimizer = make(model.parameters())
        for _ in range(steps):
            optimizer.zero_grad()
            model["inner"](torch.full((3, 4), gradient, dtype=dtype)).backward()
            optimizer.step()  # here
    return w


LINES, FIRST = inspect.getsourcelines(trained)
HERE = f"{__file__}:{FIRST + next(n for n, line in enumerate(LINES) if '# here' in line)}"


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam", "Adamax", "Adagrad", "RMSprop"])
def test_an_eps_that_half_has_not(name: str, foreach: bool) -> None:
    """0 / 0 where gradients are zero: the division is named, the addition of eps, and what helps."""
    w = trained(lambda p: getattr(optim, name)(p, foreach=foreach), 0.0, FP16, steps=3)
    assert len(w.offences) == 1 and w.first is not None
    found = w.first
    assert (found.op, found.kind, found.phase, found.step) == (
        "addcdiv",
        "underflow",
        "optimizer",
        0,
    )
    assert (found.parameter, found.state, found.location) == ("weight", "", HERE)
    assert found.cause is not None and found.cause.op == "add"
    assert "weight and its state in float32, or eps=6.104e-05" in found.remedy
    healthy = trained(lambda p: getattr(optim, name)(p, foreach=foreach, eps=6.104e-5), 0.0, FP16)
    assert healthy.first is None


STATES = {
    "Adam": "exp_avg_sq", "Adagrad": "sum", "Adadelta": "square_avg",
    "RMSprop": "square_avg",
}  # fmt: skip


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", STATES)
def test_a_square_that_overflows_in_a_state(name: str, foreach: bool) -> None:
    """The parameter stays finite: the update is divided by infinity."""
    w = trained(lambda p: getattr(optim, name)(p, foreach=foreach), 1e25, steps=2)
    assert len(w.offences) == 1 and w.first is not None
    assert (w.first.op, w.first.kind, w.first.state) == ("addcmul", "inf", STATES[name])
    assert "input 1 is 1e+25" in w.first.remedy and "ran in float32 already" in w.first.remedy
    assert f"infinity in {STATES[name]} of weight in step 0, optimizer" in str(w.first)


class Halving(optim.Optimizer):
    """Divides by the root of what it subtracts by mistake."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                state = self.state[each]
                if not state:
                    state["moment"], state["calls"] = torch.zeros_like(each), 0
                state["calls"] += 1
                if state["calls"] == 2:
                    state["moment"].sub_(each.grad.square())
                each.sub_(group["lr"] * (state["moment"] + 1).sqrt())


CASES: dict[str, tuple[Callable[[Any], optim.Optimizer], dict[str, Any], tuple[Any, ...], str]] = {
    "custom": (Halving, {"gradient": 3.0, "steps": 2}, ("sqrt", "nan", ""), "none: sqrt ran in float32"),
    "rate": (
        lambda p: optim.SGD(p, lr=math.inf), {"gradient": 1.0}, ("add", "inf", ""), "none: lr is inf",
    ),
    "fused": (
        lambda p: optim.SGD(p, lr=1e30, fused=True), {"gradient": 1e20}, ("add", "inf", ""), "none: add",
    ),
    "low": (
        lambda p: optim.SGD(p, lr=65e3), {"gradient": -0.088, "value": 6e4, "dtype": FP16},
        ("add", "overflow", ""), "none in op lists, which optimizers don't read; tried: weight and its state",
    ),
    "no eps": (
        lambda p: optim.Adam(p, eps=0.0), {"gradient": 0.0}, ("addcdiv", "nan", ""),
        "none in op lists, which optimizers don't read; tried: eps=1e-08",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_other_faults(name: str) -> None:
    make, options, expected, remedy = CASES[name]
    w = trained(make, **options)
    assert len(w.offences) == 1 and w.first is not None, w.offences
    assert (w.first.op, w.first.kind, w.first.state) == expected
    assert w.first.remedy.startswith(remedy)
    if name == "custom":
        lines, first = inspect.getsourcelines(Halving)
        inner = first + next(n for n, line in enumerate(lines) if ".sqrt()" in line)
        assert (w.first.location, w.first.through) == (f"{__file__}:{inner}", HERE)
    else:
        assert (w.first.location, w.first.through) == (HERE, "")
    assert w.first.step == options.get("steps", 1) - 1


@pytest.mark.parametrize("foreach", [False, True])
def test_values_that_a_step_loses_are_counted(foreach: bool) -> None:
    """Squares of gradients, in the state that they should enter, at the line of the step."""
    model = Scaled(0.5, FP16)
    optimizer = optim.Adam(model.parameters(), eps=1e-4, foreach=foreach)
    with hmpx.watch(underflow=True) as w:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((3, 4), 1e-5, dtype=FP16)).backward()
            optimizer.step()
    assert w.first is None
    lost = {(each.op, each.module): each for each in w.underflow if each.share_zero}
    assert set(lost) == {("addcmul", "weight: exp_avg_sq")}
    row = lost["addcmul", "weight: exp_avg_sq"]
    assert (row.share_zero, row.samples) == (1.0, 24)
    assert row.location.startswith(__file__)


def test_optimizers_too_large_to_copy() -> None:
    """The step is repeated on the values after it."""
    with hmpx.watch("collect") as w:
        layer = nn.Linear(2048, 1024, bias=False).half()
        optimizer = optim.Adam(layer.parameters())
        given = torch.ones(1, 2048, dtype=FP16)
        given[:, 2] = 0
        layer(given).sum().backward()
        optimizer.step()
    assert w.first is not None
    assert (w.first.op, w.first.kind, w.first.parameter) == ("addcdiv", "underflow", "weight")


def test_a_closure_that_is_called_several_times() -> None:
    model = Scaled(0.5, FP32)
    optimizer = optim.LBFGS(model.parameters(), lr=1e40, max_iter=1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.full((3, 4), 1e20))
        loss.backward()
        return loss

    with hmpx.watch("collect") as w:
        optimizer.step(closure)  # type: ignore[arg-type]
    assert not model.weight.isfinite().all()
    assert w.first is not None
    assert (w.first.phase, w.first.parameter, w.first.source) == ("optimizer", "weight", "op")


def test_an_error_is_raised_from_the_step() -> None:
    model = Scaled(0.5, FP32)
    optimizer = optim.SGD(model.parameters(), lr=math.inf)
    with hmpx.watch():
        model(torch.ones(3, 4)).backward()
        with pytest.raises(hmpx.NonFiniteError, match="add: infinity in the parameter weight"):
            optimizer.step()


class Once(optim.Optimizer):
    """Can't be repeated: a file is read in its step, a queue emptied."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.lock, self.rates = threading.Lock(), [math.inf]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        with self.lock:
            self.param_groups[0]["params"][0].mul_(self.rates.pop())


def test_a_step_that_cannot_be_repeated_is_reported_all_the_same() -> None:
    w = trained(Once, 1.0)
    assert w.first is not None and (w.first.op, w.first.kind) == ("Once", "inf")
    assert (w.first.parameter, w.first.location) == ("weight", HERE)
    assert w.first.remedy == "unknown: the step could not be repeated"


def test_gradients_that_are_not_finite_are_reported_where_they_come_from() -> None:
    with hmpx.watch("collect") as w:
        model = Scaled(0.0, FP32)
        optimizer = optim.Adam(model.parameters())
        (model.weight * 1).sqrt().sum().backward()
        optimizer.step()
    assert [(each.op, each.phase) for each in w.offences] == [("sqrt", "backward")]


@pytest.mark.parametrize("shape", [(3, 4), (2048, 1024)], ids=["small", "large"])
def test_a_parameter_that_was_not_finite_before(shape: tuple[int, ...]) -> None:
    """It takes no part in the training; no step has spoiled it."""
    model = Scaled(0.5, FP32)
    unused = nn.Parameter(torch.full(shape, -math.inf))
    optimizer = optim.Adam([*model.parameters(), unused])
    unused.grad = torch.zeros(shape)
    with hmpx.watch("collect") as w:
        for _ in range(2):
            model(torch.ones(3, 4)).backward()
            optimizer.step()
    assert w.first is None


class Least(optim.Optimizer):
    """Keeps the least weight so far, which starts at infinity."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for each in self.param_groups[0]["params"]:
            state = self.state[each]
            if not state:
                state["least"], state["bound"] = torch.full_like(each, math.inf), each * 0
                state["bound"].fill_(math.inf)
            state["least"] = torch.minimum(state["least"], each)


HEALTHY: dict[str, Callable[[Any], optim.Optimizer]] = {
    "zero gradients": optim.Adam,
    "infinite state": Least,
    "asgd": optim.ASGD,
    "rprop": optim.Rprop,
    "adafactor": optim.Adafactor,
    "muon": optim.Muon,
    "amsgrad": lambda p: optim.AdamW(p, amsgrad=True, maximize=True),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_steps_are_not_reported(name: str) -> None:
    assert trained(HEALTHY[name], 0.0, steps=3).first is None
    assert trained(HEALTHY[name], 1.0, steps=3).first is None


@pytest.mark.parametrize("make", [optim.Adam, optim.SGD, Halving], ids=["adam", "sgd", "custom"])
def test_a_step_that_fails_is_what_it_was(make: Callable[[Any], optim.Optimizer]) -> None:
    """Parameters, states, versions and random numbers are those of a step that is not watched."""

    def outcome() -> list[Tensor]:
        torch.manual_seed(0)
        model = Scaled(0.5, FP32)
        optimizer = make(model.parameters())
        calls: list[int] = []
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((3, 4), 1e25)).backward()
            optimizer.step()
        state = [each for each in optimizer.state[model.weight].values() if torch.is_tensor(each)]
        versions = [each._version for each in (model.weight, *state)]
        return [model.weight, *state, torch.tensor([*versions, len(calls)]), torch.rand(1)]

    plain = outcome()
    with hmpx.watch("collect") as w:
        watched = outcome()
    assert w.first is not None or make is optim.SGD
    for expected, found in zip(plain, watched, strict=True):
        assert torch.equal(expected.nan_to_num(), found.nan_to_num())


def test_lbfgs_whose_state_goes_bad() -> None:
    """Its state holds lists of tensors."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer, calls = optim.LBFGS([parameter], max_iter=4, history_size=3), [0]

    def closure() -> Tensor:
        optimizer.zero_grad()
        calls[0] += 1
        loss = (parameter.square().sum() - 3).abs().sqrt() * (math.nan if calls[0] > 8 else 1.0)
        loss.backward()
        return loss

    with hmpx.watch(mode="collect"):
        for _ in range(5):
            optimizer.step(closure)


@pytest.mark.parametrize("at", [0, 2])
def test_a_weight_spoiled_before_the_step_is_reported_by_the_next_forward(at: int) -> None:
    model = nn.Linear(2, 2)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with hmpx.watch(mode="collect") as w:
        for step in range(4):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            if step == at:
                model.weight.data.mul_(math.nan)
            optimizer.step()
    assert w.first is not None
    assert (w.first.source, w.first.parameter, w.first.step) == ("parameter", "weight", at + 1)


class Chosen(optim.Optimizer):
    """An optimizer of the program's own, whose state begins infinite, and which takes a module."""

    def step(self, model: Any = None) -> None:  # type: ignore[override]
        if not (model is None or isinstance(model, nn.Module)):  # pytest rewrites assertions
            raise TypeError
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("best", torch.full_like(parameter, math.inf))
            parameter.data.sub_(parameter.grad / self.defaults["by"])


@pytest.mark.parametrize("by", [1.0, 0.0])
def test_chosen_infinities_and_arguments(by: float) -> None:
    model = nn.Linear(2, 2)
    optimizer = Chosen(model.parameters(), {"by": by})
    with hmpx.watch(mode="collect") as w:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step(model=model)
    assert [each.op for each in w.offences] == ["div"] * (by == 0)


def test_a_gradient_that_is_clipped_by_a_norm_of_zero() -> None:
    """0 times infinity, written to the gradient by the program: the division is named."""
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with hmpx.watch(mode="collect") as w:
        (model(torch.ones(1, 2)) * 0).sum().backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        norm = torch.stack([each.norm() for each in gradients]).norm()
        coefficient = torch.ones(()) / norm
        for each in gradients:
            each.mul_(coefficient)
        optimizer.step()
    assert w.first is not None and (w.first.op, w.first.step) == ("truediv", 0)
    assert "input 1 is 0; input 1 was made by linalg_vector_norm" in w.first.remedy


def test_a_learning_rate_that_an_op_made_infinite() -> None:
    """The op is named, not the update that takes the rate."""
    model = nn.Linear(2, 2)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with hmpx.watch(mode="collect") as w:
        for step in range(3):
            optimizer.param_groups[0]["lr"] = float(torch.rsqrt(torch.tensor(2.0 - step)))
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert w.first is not None
    assert (w.first.op, w.first.kind, w.first.step) == ("rsqrt", "inf", 2)


LOG: list[float] = []
COUNT = 0


def noted(value: Tensor) -> Tensor:
    LOG.append(float(value.amax()))
    return value


class Counting(Halving):
    """Effects beyond the optimizer, by which a second run would be seen."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        super().step()

    def _counted(self) -> None:
        global COUNT
        COUNT += 1


class CountingGlobal(Counting):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self._counted()
        super().step()


class Noting(Counting):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        noted(self.param_groups[0]["params"][0])
        super().step()


class Printing(Counting):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        print("step")
        super().step()


class Writing(Counting):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.write = LOG.append

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.write(1.0)
        super().step()


@pytest.mark.parametrize("make", [CountingGlobal, Noting, Printing, Writing])
def test_a_step_with_effects_is_not_repeated(
    make: type[Counting], capsys: pytest.CaptureFixture[str]
) -> None:
    """What it prints, counts and keeps elsewhere is there once for each step of the program."""
    LOG.clear()
    before = COUNT
    w = trained(make, 3.0, steps=2)
    effects = COUNT - before + len(LOG) + capsys.readouterr().out.count("step")
    assert effects == 2
    assert w.first is not None and (w.first.op, w.first.kind) == (make.__name__, "nan")
    assert (w.first.parameter, w.first.location) == ("weight", HERE)
    assert w.first.remedy.startswith("unknown: the step is not repeated")


class Normalizing(optim.Optimizer):
    """Divides gradients by their norms, in place."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gradients = [each.grad for each in self.param_groups[0]["params"]]
        torch._foreach_mul_(gradients, 2.0**-14)
        torch._foreach_div_(gradients, torch._foreach_norm(gradients))
        torch._foreach_add_(self.param_groups[0]["params"], gradients, alpha=-0.1)


def test_a_step_that_writes_to_gradients() -> None:
    assert trained(Normalizing, 2.0**-9, FP16).first is None
    found = trained(Normalizing, 2.0**-12, FP16).first
    assert found is not None and found.cause is not None
    assert (found.op, found.kind, found.phase, found.cause.op) == (
        "div",
        "underflow",
        "optimizer",
        "mul",
    )


def test_a_step_of_its_own_functions_is_repeated() -> None:
    w = trained(Counting, 3.0, steps=2)
    assert w.first is not None and (w.first.op, w.first.kind) == ("sqrt", "nan")
