"""Optimizers of the stand-in for habana_frameworks, against torch's and the papers' definitions."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hmpx
from hmpx.integrations.optimizers import (
    FusedAdagrad,
    FusedAdamW,
    FusedLamb,
    FusedLars,
    FusedResourceApplyMomentum,
    FusedSGD,
)

STEPS = 50

Make = Callable[[Any], Any]


def model() -> nn.Module:
    """Returns a model with parameters of one and two dimensions, one of them all zeros."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))
    nn.init.zeros_(made[2].bias)  # type: ignore[arg-type]
    return made.double()


def gradients(number: int, shapes: Iterable[torch.Size]) -> list[torch.Tensor]:
    """Returns the gradients of one step, the same for everybody."""
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def trajectory(make: Make, *, in_groups: bool = False) -> list[np.ndarray]:
    """Returns the parameters after `STEPS` steps, the learning rate changed on the way."""
    trained = model()
    parameters = [*trained.parameters()]
    optimizer = make(groups(parameters) if in_groups else parameters)
    for number in range(STEPS):
        for p, g in zip(parameters, gradients(number, [p.shape for p in parameters]), strict=True):
            p.grad = g
        if number == STEPS // 2:
            for group in optimizer.param_groups:
                group["lr"] /= 2
        optimizer.step()
    return [p.detach().numpy() for p in parameters]


def groups(parameters: list[torch.Tensor]) -> list[dict[str, Any]]:
    """Returns two groups, as scripts make them: with and without weight decay."""
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (
            lambda p: FusedAdamW(p, 0.01, (0.8, 0.9), 1e-6, 0.1),
            lambda p: torch.optim.AdamW(p, 0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1),
        ),
        (
            lambda p: FusedAdamW(p),
            lambda p: torch.optim.AdamW(p, 1e-3, eps=1e-6, weight_decay=0.0),
        ),
        (lambda p: FusedAdagrad(p), lambda p: torch.optim.Adagrad(p)),
        (
            lambda p: FusedAdagrad(p, 0.1, 0.01, 0.02, 0.3, 1e-6),
            lambda p: torch.optim.Adagrad(
                p, lr=0.1, lr_decay=0.01, weight_decay=0.02, initial_accumulator_value=0.3, eps=1e-6
            ),
        ),
        (
            lambda p: FusedSGD(p, 0.1, 0.9, 0.01, 0.2),
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01, dampening=0.2),
        ),
        (
            lambda p: FusedSGD(p, lr=0.1, momentum=0.9, nesterov=True),
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
        ),
    ],
)
@pytest.mark.parametrize("in_groups", [False, True])
def test_torchs_optimizers_are_used_where_there_are_any(
    ours: Make, torchs: Make, in_groups: bool
) -> None:
    """Bit for bit, with Habana's arguments by position and its defaults."""
    actual, expected = (trajectory(make, in_groups=in_groups) for make in (ours, torchs))
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)


# --- references: NumPy, from the papers' pseudocode ---------------------------------------------


class Reference:
    """One parameter after the other, in NumPy."""

    def __init__(self, parameters: Any, **settings: Any) -> None:
        given = [*parameters]
        self.param_groups = [
            {**settings, **g} if isinstance(g, dict) else {**settings, "params": [g]} for g in given
        ]
        self.memory: dict[int, dict[str, Any]] = {}
        self.count = 0

    def step(self) -> None:
        self.count += 1
        everything = [p for g in self.param_groups for p in g["params"]]
        divisor = self.divisor(everything)
        for group in self.param_groups:
            for p in group["params"]:
                w, g = p.detach().numpy(), p.grad.numpy() / divisor
                m = self.memory.setdefault(id(p), {"m": 0 * w, "v": 0 * w})
                w[...] = self.updated(w, g, m, group)

    def divisor(self, parameters: list[Any]) -> float:
        return 1.0

    def updated(self, w: Any, g: Any, m: Any, group: Any) -> Any:
        raise NotImplementedError


class AdamWUncorrected(Reference):
    """Decoupled weight decay; moments as they are."""

    def updated(self, w: Any, g: Any, m: Any, s: Any) -> Any:
        b1, b2 = s["betas"]
        m["m"] = b1 * m["m"] + (1 - b1) * g
        m["v"] = b2 * m["v"] + (1 - b2) * g * g
        return w * (1 - s["lr"] * s["weight_decay"]) - s["lr"] * m["m"] / (
            np.sqrt(m["v"]) + s["eps"]
        )


class Lamb(Reference):
    """Algorithm 2 of arXiv:1904.00962, its norms unclipped, after clipping of the global norm."""

    def divisor(self, parameters: list[Any]) -> float:
        most = self.param_groups[0]["max_grad_norm"]
        total = math.sqrt(sum(float((p.grad.numpy() ** 2).sum()) for p in parameters))
        return 1.0 if most is None else max(1.0, total / most)

    def updated(self, w: Any, g: Any, m: Any, s: Any) -> Any:
        b1, b2 = s["betas"]
        if not s["adam_w_mode"]:
            g = g + s["weight_decay"] * w
        m["m"] = b1 * m["m"] + ((1 - b1) if s["grad_averaging"] else 1) * g
        m["v"] = b2 * m["v"] + (1 - b2) * g**2
        c1, c2 = (1 - b1**self.count, 1 - b2**self.count) if s["bias_correction"] else (1, 1)
        r = (m["m"] / c1) / (np.sqrt(m["v"] / c2) + s["eps"])
        if s["adam_w_mode"]:
            r = r + s["weight_decay"] * w
        ratio = 1.0
        if s["weight_decay"] or s["use_lamb"]:
            x, y = np.sqrt((w * w).sum()), np.sqrt((r * r).sum())
            ratio = x / y if x > 0 and y > 0 else 1.0
        return w - s["lr"] * ratio * r


class Momentum(Reference):
    """TensorFlow's ResourceApplyKerasMomentum."""

    def updated(self, w: Any, g: Any, m: Any, s: Any) -> Any:
        g = g + s["weight_decay"] * w
        m["m"] = s["momentum"] * m["m"] - s["lr"] * g
        return w + (s["momentum"] * m["m"] - s["lr"] * g if s["nesterov"] else m["m"])


class Lars(Reference):
    """Algorithm 1 of arXiv:1708.03888, whose velocity takes the learning rate."""

    def updated(self, w: Any, g: Any, m: Any, s: Any) -> Any:
        if s["mask"](w):
            x, y = np.sqrt((w * w).sum()), np.sqrt((g * g).sum())
            local = s["eeta"] * x / (y + s["weight_decay"] * x + s["eps"]) if x * y > 0 else 1.0
            g = local * (g + s["weight_decay"] * w)
        m["m"] = s["momentum"] * m["m"] + s["lr"] * g
        return w - m["m"]


LAMB = {
    "lr": 0.02,
    "bias_correction": True,
    "betas": (0.9, 0.99),
    "eps": 1e-6,
    "weight_decay": 0.05,
    "adam_w_mode": True,
    "grad_averaging": True,
    "max_grad_norm": 1.0,
    "use_lamb": False,
}


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"bias_correction": False},
        {"grad_averaging": False},
        {"max_grad_norm": None},
        {"max_grad_norm": 1e6},
        {"weight_decay": 0.0},
        {"weight_decay": 0.0, "use_lamb": True},
        {"adam_w_mode": False},
    ],
)
@pytest.mark.parametrize("in_groups", [False, True])
def test_lamb_is_the_papers(changed: dict[str, Any], in_groups: bool) -> None:
    """With each of Habana's switches, and groups without weight decay."""
    settings = {**LAMB, **changed}
    actual = trajectory(lambda p: FusedLamb(p, **settings), in_groups=in_groups)
    expected = trajectory(lambda p: Lamb(p, **settings), in_groups=in_groups)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("in_groups", [False, True])
def test_adamw_without_bias_correction(in_groups: bool) -> None:
    """What torch's has no switch for."""
    settings = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.05}
    actual = trajectory(
        lambda p: FusedAdamW(p, **settings, bias_correction=False), in_groups=in_groups
    )
    expected = trajectory(lambda p: AdamWUncorrected(p, **settings), in_groups=in_groups)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
def test_resource_apply_momentum_is_tensorflows(nesterov: bool) -> None:
    """The buffer takes the learning rate of its time."""
    settings = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "nesterov": nesterov}
    actual = trajectory(lambda p: FusedResourceApplyMomentum(p, **settings))
    expected = trajectory(lambda p: Momentum(p, **settings))
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mask", [lambda w: w.ndim > 1, lambda w: True, lambda w: False])
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_lars_is_the_papers(mask: Callable[[Any], bool], eps: float) -> None:
    """Around the momentum that Habana's scripts use with it; unmasked layers without weight decay."""

    def ours(parameters: Any) -> Any:
        inner = FusedResourceApplyMomentum(parameters, lr=0.5, momentum=0.9, weight_decay=0.01)
        return FusedLars(inner, [mask(p.detach().numpy()) for p in parameters], eps=eps)

    settings = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.01, "eeta": 0.001, "eps": eps}
    actual, expected = trajectory(ours), trajectory(lambda p: Lars(p, **settings, mask=mask))
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


# --- as scripts use them ------------------------------------------------------------------------

MAKERS: dict[str, Make] = {
    "FusedAdagrad": lambda p: FusedAdagrad(p, 0.1),
    "FusedAdamW": lambda p: FusedAdamW(p, weight_decay=0.1),
    "FusedAdamW uncorrected": lambda p: FusedAdamW(p, bias_correction=False),
    "FusedLamb": lambda p: FusedLamb(p, weight_decay=0.1, dtype=torch.bfloat16),
    "FusedResourceApplyMomentum": lambda p: FusedResourceApplyMomentum(p, 0.1, 0.9),
    "FusedSGD": lambda p: FusedSGD(p, 0.1, 0.9),
    "FusedLars": lambda p: FusedLars(FusedSGD(p, 0.1, 0.9, 0.1), [p.dim() > 1 for p in p]),
}


def run(optimizer: Any, parameters: list[torch.Tensor], numbers: range) -> None:
    """Makes a step for each number."""
    for number in numbers:
        for p, g in zip(parameters, gradients(number, [p.shape for p in parameters]), strict=True):
            p.grad = g
        optimizer.step()


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("how", ["state_dict", "deepcopy", "pickle"])
def test_training_goes_on_from_a_checkpoint(make: Make, how: str) -> None:
    """Bit for bit, by state_dict, and as a copy of optimizer and parameters together."""
    whole = [*model().parameters()]
    run(make(whole), whole, range(10))
    parameters = [*model().parameters()]
    optimizer = make(parameters)
    run(optimizer, parameters, range(5))
    if how == "state_dict":
        saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
        parameters = [nn.Parameter(p.detach().clone()) for p in parameters]
        optimizer = make(parameters)
        optimizer.load_state_dict(saved)
    elif how == "deepcopy":
        parameters, optimizer = copy.deepcopy((parameters, optimizer))
    else:
        parameters, optimizer = pickle.loads(pickle.dumps((parameters, optimizer)))
    run(optimizer, parameters, range(5, 10))
    for a, b in zip(parameters, whole, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_schedulers_closures_and_conversions(make: Make) -> None:
    """A scheduler sets the rate; a closure's loss comes back, cast; the step itself is not cast."""
    trained = model().float()
    parameters = [*trained.parameters()]
    optimizer = make(parameters)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    before = optimizer.param_groups[0]["lr"]
    x = torch.randn(4, 6)
    with hmpx.convert(lists="hmp", legalize="never", device_types={"cpu"}):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            output = trained(x)
            assert output.dtype is torch.bfloat16
            loss = output.float().square().mean()
            loss.backward()
            return loss

        assert optimizer.step(closure).dtype is torch.float32
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == before / 2
    assert {p.dtype for p in parameters} == {torch.float32}
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    assert {v.dtype for v in state} <= {torch.float32}


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda p: FusedLamb(p, amsgrad=True), RuntimeError),
        (lambda p: FusedSGD(p), TypeError),
        (lambda p: FusedAdamW(p, moments_dtype=torch.bfloat16), NotImplementedError),
        (lambda p: FusedLamb([]), ValueError),
    ],
)
def test_wrong_values_are_refused(make: Make, error: type[Exception]) -> None:
    """Where they are given."""
    with pytest.raises(error):
        make([nn.Parameter(torch.ones(2))])


#: As Habana documents them.
SIGNATURES = {
    FusedAdagrad: "lr=0.01 lr_decay=0 weight_decay=0 initial_accumulator_value=0 eps=1e-10",
    FusedAdamW: "lr=0.001 betas=(0.9,0.999) eps=1e-06 weight_decay=0.0 bias_correction=True "
    "moments_dtype=None",
    FusedLamb: "lr=0.001 bias_correction=True betas=(0.9,0.999) eps=1e-06 weight_decay=0.0 "
    "amsgrad=False adam_w_mode=True grad_averaging=True set_grad_none=True max_grad_norm=1.0 "
    "use_lamb=False fused=False dtype=None",
    FusedSGD: "lr momentum=0 weight_decay=0 dampening=0 nesterov=False",
    FusedResourceApplyMomentum: "lr momentum=0 weight_decay=0 nesterov=False",
}


@pytest.mark.parametrize("optimizer", SIGNATURES, ids=lambda each: each.__name__)
def test_arguments_and_defaults_are_habanas(optimizer: type[Any]) -> None:
    """By position, too."""
    _, _, *parameters = inspect.signature(optimizer.__init__).parameters.values()
    said = [
        p.name if p.default is p.empty else f"{p.name}={p.default!r}".replace(" ", "")
        for p in parameters
    ]
    assert " ".join(said) == SIGNATURES[optimizer]
