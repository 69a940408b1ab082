"""An observer changes nothing of the program that it watches, whatever it computes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import hmpx

CPU = {"cpu"}


def run_again(call: hmpx.OpCall, tensors: hmpx.CallTensors) -> None:
    """Runs the call again, as the documentation shows it."""
    tensors.run(*tensors.given, **tensors.given_kwargs)


def nothing(call: hmpx.OpCall, tensors: hmpx.CallTensors) -> None:
    """Does nothing."""


def with_and_without(
    program: Callable[[], Any], observer: Callable[..., None], **options: Any
) -> list[Any]:
    """Returns what a program gives without an observer, and with."""
    with hmpx.convert(**{"device_types": CPU, **options}):
        torch.manual_seed(0)
        results = [program()]
        with hmpx.attach(observer, tensors=True):
            torch.manual_seed(0)
            results.append(program())
    return results


def test_stochastic_rounding() -> None:
    """What inputs are cast to is found out without drawing the program's random numbers."""

    def program() -> list[Any]:
        product = torch.mm(torch.full((2, 2), 0.3), torch.full((2, 2), 0.7))
        return [product.tolist(), torch.rand(1).item()]

    options = {"low_precision_type": "float8_e4m3fn", "rounding": "stochastic"}
    without, observed = with_and_without(program, nothing, **options)
    assert without == observed


@pytest.mark.parametrize("tensors", [False, True])
def test_inputs_are_freed(tensors: bool) -> None:
    """As soon as the program lets go of them."""
    observer: Callable[..., None] = nothing if tensors else lambda call: None
    with hmpx.convert(device_types=CPU), hmpx.attach(observer, tensors=tensors):
        gc.collect()
        gc.disable()
        try:
            x = torch.ones(2, 2)
            alive = weakref.ref(x)
            torch.mm(x, x)
            del x
            assert alive() is None
        finally:
            gc.enable()


def test_random_numbers_of_a_second_run() -> None:
    """Dropout that an observer runs again draws what the call drew, and nothing of the program's."""

    def program() -> float:
        F.dropout(torch.ones(4), 0.5)
        return torch.rand(1).item()

    without, observed = with_and_without(program, run_again)
    assert without == observed


@pytest.mark.parametrize("in_forward", [True, False])
def test_checkpoint_with_an_observer_of_one_half(in_forward: bool) -> None:
    """A checkpoint counts saved tensors, among which are none of an observer's."""
    layers = nn.Sequential(nn.Linear(3, 3), nn.Softmax(-1), nn.Linear(3, 3))
    x = torch.ones(2, 3, requires_grad=True)
    with hmpx.convert(device_types=CPU):
        attached = hmpx.attach(run_again, tensors=True) if in_forward else None
        y = checkpoint(layers, x, use_reentrant=False)
        if attached is not None:
            attached.detach()
        else:
            attached = hmpx.attach(run_again, tensors=True)
        try:
            y.float().sum().backward()
        finally:
            attached.detach()


def test_freeze() -> None:
    """What an observer computes is no use of the weights."""

    def run_in_fp32(call: hmpx.OpCall, tensors: hmpx.CallTensors) -> None:
        given = (t.float() if isinstance(t, torch.Tensor) else t for t in tensors.given)
        tensors.run(*given)

    kept = []
    for observer in (nothing, run_in_fp32):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
        with hmpx.convert(device_types=CPU), hmpx.attach(observer, tensors=True):
            frozen = hmpx.freeze(model, torch.ones(1, 4))
            kept.append([p.dtype for p in model.parameters()])
            frozen.undo()
    assert kept[0] == kept[1]


@pytest.mark.parametrize("trace", ["export", "make_fx"])
def test_graphs_are_the_same(trace: str) -> None:
    """No copies are made for an observer in a graph."""

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.mm(x, x).add_(1.0)

    def program() -> list[str]:
        x = torch.ones(2, 2)
        graph = torch.export.export(Model(), (x,)) if trace == "export" else make_fx(Model())(x)
        return [node.name for node in graph.graph.nodes]

    without, observed = with_and_without(program, nothing)
    assert without == observed
