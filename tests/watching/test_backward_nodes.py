"""Which gradients are looked at: those of inputs where they are computed, unless a cast may overflow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hmpx

pytestmark = pytest.mark.usefixtures("no_search_for_early_names")

FP16 = torch.float16


@pytest.mark.parametrize("name", ["weight", "bias", "input"])
def test_one_gradient_of_several_overflows(name: str) -> None:
    """As that of the weight alone does, where the input is large and the others are small."""
    h = torch.full((2, 4), 1e-3 if name != "weight" else 6e4, requires_grad=True)
    weight = torch.full((3, 4), 1e-5 if name != "input" else 6e4, requires_grad=True)
    bias = torch.zeros(3, requires_grad=True)
    with hmpx.convert(device_types={"cpu"}, low_precision_type=FP16), hmpx.watch("collect") as w:
        given = h.repeat(100, 1) if name == "bias" else h
        y = F.linear(given, weight, bias)
        upstream = {"weight": 4.0, "bias": 1e3, "input": 4.0}[name]
        y.float().backward(torch.full(y.shape, upstream))
    gradients = {"weight": weight.grad, "bias": bias.grad, "input": h.grad}
    bad = [
        each
        for each, value in gradients.items()
        if value is not None and not value.isfinite().all()
    ]
    assert bad == [name]
    assert w.first is not None and (w.first.op, w.first.phase) == ("linear", "backward")
    assert w.first.source == "op"


def test_a_gradient_that_overflows_in_the_cast_to_a_narrow_leaf() -> None:
    """The op computes in float32, its parameter is float16: what reaches that has been cast."""
    policy = hmpx.Policy.from_ops(fp32=["mul"])
    with hmpx.convert(policy=policy, device_types={"cpu"}), hmpx.watch("collect") as w:
        weight = torch.full((3,), 1e-3, dtype=FP16, requires_grad=True)
        y = torch.mul(weight, torch.full((3,), 1e5))
        assert y.dtype is torch.float32
        y.sum().backward()
    assert weight.grad is not None and weight.grad.isinf().all()
    assert w.first is not None and (w.first.op, w.first.phase) == ("mul", "backward")
    assert w.first.source == "op"


class Bad(torch.autograd.Function):
    """A function whose gradient is NaN."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        return a * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, float("nan"))


@pytest.mark.parametrize("is_cast", [True, False], ids=["cast", "as it is"])
def test_a_gradient_that_the_program_reads_is_no_data(is_cast: bool) -> None:
    """As for its norm: what went wrong is where it was computed, and that alone is reported."""
    weight = torch.nn.Parameter(torch.full((3, 4), 0.5))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    policy = hmpx.Policy.from_ops(low=["linear"] if is_cast else [])
    with hmpx.convert(policy=policy, device_types={"cpu"}), hmpx.watch("collect") as w:
        for is_bad in (False, True):
            optimizer.zero_grad()
            y = F.linear(torch.ones(2, 4), weight)
            (Bad.apply(y) if is_bad else y).sum().backward()
            assert weight.grad is not None
            weight.grad.norm()
            optimizer.step()
    assert [(each.op, each.phase) for each in w.offences] == [("BadBackward", "backward")]


class Unit(torch.autograd.Function):
    """Divides by the norm; its backward, too."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        norm = a.norm()
        ctx.save_for_backward(norm)
        return a * (1 / (norm + 1e-6))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        [norm] = ctx.saved_tensors
        return gradient / norm


class Scaled(torch.nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        return Unit.apply(a)


def test_the_module_of_ops_in_the_backward_of_a_function() -> None:
    """They run without a module; that of the function's forward is named."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Scaled(), torch.nn.Tanh())
    for each in model.parameters():
        torch.nn.init.zeros_(each)
    with hmpx.watch("collect") as w:
        model(torch.ones(2, 4)).sum().backward()
    assert w.first is not None
    assert (w.first.op, w.first.phase, w.first.module) == ("truediv", "backward", "1")
