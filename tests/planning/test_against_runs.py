"""Figures of a plan are those of a real run, to the byte."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

import hmpx

from .models import MODELS

pytestmark = pytest.mark.models

NATIVE = {"legalize": "never", "device_types": {"cpu"}}


def figures(memory: Any) -> dict[str, Any]:
    """Returns all of a memory's figures, those at its peaks by kind."""
    return {
        "parameters": memory.parameter_bytes,
        "buffers": memory.buffer_bytes,
        "gradients": memory.gradient_bytes,
        "optimizer": memory.optimizer_bytes,
        "saved": dict(memory.saved),
        "weight casts": memory.weight_cast_bytes,
        "peak": memory.peak,
        "phases": memory.phases,
    }


def run(
    build: Callable[[], nn.Module],
    make: Callable[[], dict[str, Any]],
    region: Callable[[], AbstractContextManager[Any]],
) -> Any:
    """Returns the record of a real training step of a model that was built before ``region``, as plans are."""
    torch.manual_seed(0)
    model, inputs = build().train(), make()
    with region(), hmpx.record(memory=True) as rec:
        output = model(**inputs)
        output.loss.backward()
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.step()
    parameters = sum(each.numel() * each.element_size() for each in model.parameters())
    assert rec.memory.parameter_bytes == parameters
    return rec


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MODELS)
def test_each_figure_is_that_of_a_real_run(name: str) -> None:
    """Parameters, gradients, states, saved bytes by dtype, weight casts, peaks by kind, FLOPs."""
    build, make = MODELS[name]
    plan = hmpx.plan(build, make, device="cpu", legalize="never")
    real = run(build, make, lambda: hmpx.convert(**NATIVE))
    assert figures(plan.memory) == figures(real.memory)
    assert plan.report.totals == real.report().totals
    assert plan.weight_cast_bytes > 0
    assert set(plan.memory.saved) >= {"bfloat16"}

    real = run(build, make, contextlib.nullcontext)
    assert figures(plan.run("float32").memory) == figures(real.memory)

    real = run(build, make, lambda: torch.autocast("cpu", torch.bfloat16))
    autocast = plan.run("autocast").memory
    assert dict(autocast.saved) == dict(real.memory.saved)
    assert autocast.weight_cast_bytes == real.memory.weight_cast_bytes


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MODELS)
def test_legalized_ops_keep_what_they_keep(name: str) -> None:
    """Low-precision tensors in the place of those that they compute with."""
    build, make = MODELS[name]
    plan = hmpx.plan(build, make, device="cpu", legalize="always")
    real = run(build, make, lambda: hmpx.convert(legalize="always", device_types={"cpu"}))
    assert figures(plan.memory) == figures(real.memory)
    assert plan.report.totals == real.report().totals


def test_a_plan_with_keyword_arguments_is_that_of_positional_ones() -> None:
    """A tuple holds positional arguments, a mapping those by name."""
    model = nn.Bilinear(4, 3, 2)
    x, y = torch.ones(5, 4), torch.ones(5, 3)
    found = [
        hmpx.plan(model, inputs, device="cpu", legalize="never").saved_bytes
        for inputs in ((x, y), {"input1": x, "input2": y}, lambda: (x, y))
    ]
    assert found[0] > 0
    assert found == [found[0]] * 3


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["SGD", "SGD momentum=0.9", "Adam", "Adafactor", "NAdam", "Muon"])
def test_an_optimizer_keeps_what_it_keeps_in_a_real_step(name: str) -> None:
    """Also those that read values, of which there are none."""

    def build() -> nn.Module:
        return nn.Linear(48, 32, bias=False)

    kind, *options = name.split()
    arguments = {"momentum": 0.9} if options else {}
    model = build()
    model(torch.ones(2, 48)).sum().backward()
    optimizer = getattr(torch.optim, kind)(model.parameters(), **arguments)
    optimizer.step()
    kept = [
        each
        for state in optimizer.state.values()
        for each in state.values()
        if isinstance(each, torch.Tensor)
    ]
    plan = hmpx.plan(build, lambda: torch.ones(2, 48), device="cpu", optimizer=name)
    assert plan.optimizer_bytes == sum(each.untyped_storage().nbytes() for each in kept)
    given = hmpx.plan(
        build,
        torch.ones(2, 48),
        device="cpu",
        optimizer=lambda parameters: getattr(torch.optim, kind)(parameters, **arguments),
    )
    assert given.optimizer_bytes == plan.optimizer_bytes
