"""Modules of the stand-in for habana_frameworks against what torch computes; see also its optimizers."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import hmpx
from hmpx.integrations import hpu
from hmpx.integrations.hpex import FusedClipNorm, FusedEMA


@pytest.fixture(params=[False, True], ids=["fp32", "converted"])
def conversion(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Runs the test in fp32 and under HMP's lists, which know nothing of Habana's kernels."""
    if not request.param:
        yield False
        return
    with hmpx.convert(lists="hmp", legalize="never", device_types={"cpu"}):
        yield True


# --- gradients and averages ---------------------------------------------------------------------


@pytest.mark.usefixtures("conversion")
@pytest.mark.parametrize("max_norm", [0.1, 1e6])
@pytest.mark.parametrize("how", ["given", "kept", "one"])
def test_clipping_is_torchs(max_norm: float, how: str) -> None:
    """By the parameters given to clip_norm, by those kept from a generator, and of one tensor."""
    parameters = [nn.Parameter(torch.randn(s)) for s in ((3, 4), (5,))]
    parameters = parameters[:1] if how == "one" else parameters
    for p in parameters:
        p.grad = torch.randn_like(p)
    same = copy.deepcopy(parameters)
    for p, q in zip(parameters, same, strict=True):
        q.grad = None if p.grad is None else p.grad.clone()
    clip = FusedClipNorm((p for p in parameters), max_norm)
    given = {"given": (parameters,), "kept": (), "one": (parameters[0],)}[how]
    norm = clip.clip_norm(*given)
    with hmpx.disable_casts():
        assert torch.equal(norm, nn.utils.clip_grad_norm_(same, max_norm))
    for p, q in zip(parameters, same, strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)


@pytest.mark.usefixtures("conversion")
def test_the_moving_average_is_that_of_its_definition() -> None:
    """Of parameters and floating buffers, by a decay that grows; others stay as they were copied."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    average = FusedEMA(nn.DataParallel(model), decay=0.99, updates=3)
    assert not average.ema.training
    assert not any(p.requires_grad for p in average.ema.parameters())
    expected = {k: v.clone() for k, v in model.state_dict().items()}
    for updates in (4, 5):
        with torch.no_grad(), hmpx.disable_casts():
            for value in model.state_dict().values():
                value.add_(1)
            decay = 0.99 * (1 - math.exp(-updates / 2000))
            for name, value in model.state_dict().items():
                if value.is_floating_point():
                    expected[name] = expected[name] * decay + value * (1 - decay)
        average.update(model)
    for name, value in average.ema.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6)
    model.names = ["a"]  # type: ignore[assignment]
    average.update_attr(model, include=("names",))
    assert average.ema.names == ["a"]


# --- the device ---------------------------------------------------------------------------------


def test_wrapped_models_are_called_as_they_are() -> None:
    """By each of Habana's wrappers for graphs."""
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    assert hpu.wrap_in_hpu_graph(model, disable_tensor_cache=True) is model
    assert hpu.ModuleCacher(max_graphs=10)(model=model, inplace=True) is model
    assert hpu.make_graphed_callables(model, (x,)) is model
