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
from torch.utils.flop_counter import FlopCounterMode

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


def test_hooks_of_saved_tensors() -> None:
    """The program's hooks get none of an observer's tensors."""

    def program() -> int:
        packed: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
            F.softmax(torch.ones(2, 2, requires_grad=True), -1)
        return len(packed)

    without, observed = with_and_without(program, run_again)
    assert without == observed


def test_modes_of_the_program() -> None:
    """A mode that counts operations counts none of an observer's."""

    def program() -> int:
        with FlopCounterMode(display=False) as counter:
            torch.mm(torch.ones(4, 4), torch.ones(4, 4))
        return counter.get_total_flops()

    without, observed = with_and_without(program, run_again)
    assert without == observed


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


def test_copies_are_each_observers_own() -> None:
    """One observer runs an in-place op again; the next finds the input all the same."""
    given: list[list[float]] = []

    def observer(call: hmpx.OpCall, tensors: hmpx.CallTensors) -> None:
        given.append(tensors.given[0].tolist())

    with (
        hmpx.convert(device_types=CPU),
        hmpx.attach(run_again, tensors=True),
        hmpx.attach(observer, tensors=True),
    ):
        torch.zeros(2).add_(torch.ones(2))
    assert given == [[0.0, 0.0]]


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


def test_item_while_compiling() -> None:
    """There are no tensors by then to look at."""

    def observer(call: hmpx.OpCall, tensors: hmpx.CallTensors | None) -> None:
        if tensors is not None:
            tensors.result.abs().max().item()

    with hmpx.convert(device_types=CPU), hmpx.attach(observer, tensors=True):
        try:
            f = torch.compile(lambda x: torch.mm(x, x), backend="eager", fullgraph=True)
            f(torch.ones(2, 2))
        finally:
            torch._dynamo.reset()


def test_calls_can_be_hashed_under_symbolic_shapes() -> None:
    """What depends on symbols is not in them."""
    hashes: list[int] = []

    def observer(call: hmpx.OpCall) -> None:
        hashes.append(hash(call))

    with hmpx.convert(device_types=CPU), hmpx.attach(observer):
        make_fx(lambda x: F.softmax(torch.mm(x, x), -1), tracing_mode="symbolic")(torch.ones(3, 3))


def test_a_second_run_under_autocast() -> None:
    """Nothing is cast in ``run``, by torch.autocast neither."""
    dtypes: list[torch.dtype] = []

    def observer(call: hmpx.OpCall, tensors: hmpx.CallTensors) -> None:
        dtypes.append(tensors.run(*tensors.given).dtype)

    x = torch.ones(2, 2)
    with hmpx.convert(device_types=CPU), hmpx.attach(observer, tensors=True):
        torch.mm(x, x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.mm(x, x)
    assert dtypes == [torch.float32, torch.float32]


def test_calls_again_in_fp32() -> None:
    """Where inputs have come from ops that ran in low precision, and from others."""
    errors: list[float] = []

    def observer(call: hmpx.OpCall, tensors: hmpx.CallTensors) -> None:
        errors.append((tensors.result - tensors.in_fp32()).abs().max().item())

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    with hmpx.convert(lists="lean", device_types=CPU), hmpx.attach(observer, tensors=True):
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(0)))
    assert len(errors) == 3
    assert 0 < errors[0] < 0.02


@pytest.mark.parametrize("how", ["watch", "record", "draw", "compare"])
def test_weights_are_written_to_by_views(how: str) -> None:
    """A view made without gradients whose base was written to refuses to tell its autograd node."""

    def initialized(weight: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            weight[:2] *= 3
            view = weight[2:]
            view.mul_(2).add_(1)
            weight[3] = (view * 2).exp()[0]
        return weight * 2

    def new() -> torch.Tensor:
        return torch.arange(8.0).view(4, 2).mul(0.25).requires_grad_()

    with hmpx.convert(device_types=CPU):
        unobserved = initialized(new())
        results = []

        def program() -> torch.Tensor:
            results.append(initialized(new()))
            return results[-1]

        if how == "watch":
            with hmpx.watch():
                program().sum().backward()
        elif how == "record":
            with hmpx.record(memory=True):
                program().sum().backward()
        elif how == "draw":
            hmpx.draw(program)
        else:
            hmpx.compare(program)
    assert results
    assert all(torch.equal(each, unobserved) for each in results)
