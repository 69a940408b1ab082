"""Observers leave torch.autocast's decisions alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hmpx

OBSERVERS: dict[str, Callable[[], Any]] = {
    "watch": lambda: hmpx.watch("collect"),
    "record": hmpx.record,
    "attach": lambda: hmpx.attach(lambda call: None, every_op=True),
    "watch and attach": lambda: _both(),
}


@contextlib.contextmanager
def _both() -> Any:
    with hmpx.watch("collect"), hmpx.attach(lambda call: None, every_op=True):
        yield


AROUND: dict[str, Callable[[], Any]] = {
    "nothing": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast in float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "autocast that is off": lambda: torch.autocast("cpu", enabled=False),
}


def _results() -> list[torch.Tensor]:
    torch.manual_seed(0)
    x, layer = torch.randn(4, 4), nn.Linear(4, 4)
    big = torch.full((4, 4), 3e4)
    asked = torch.tensor(torch.is_autocast_enabled("cpu"))
    found = [x @ x, layer(x), torch.mm(x, x), big @ big, x + (x @ x), (x @ x).softmax(0), asked]
    with torch.autocast("cpu", enabled=False):
        found.append(torch.mm(x, x))
    for use_reentrant in (False, True):
        given = x.clone().requires_grad_()
        checkpoint(layer, given, use_reentrant=use_reentrant).float().sum().backward()
        found.append(given.grad)
    found += [torch.func.vmap(torch.mv, (0, 0))(x.expand(3, 4, 4), x[:3])]
    found += [torch.func.grad(lambda y: (y @ y).float().sum())(x)]
    target = x.clone()
    target.addmm_(x, x)
    return [*found, target]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("observer", ["record", "watch", "attach"])
def test_observers_change_no_bit_of_a_conversion(observer: str, around: str) -> None:
    with hmpx.convert(policy={"lists": "none", "low": ["linear"]}, device_types={"cpu"}):
        with AROUND[around]():
            plain = _results()
        with AROUND[around](), OBSERVERS[observer]():
            seen = _results()
    for expected, found in zip(plain, seen, strict=True):
        assert found.dtype is expected.dtype
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())
