"""Branches and loops that torch traces run as in fp32, whatever is cast in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hmpx

X, W = torch.eye(4), torch.full((4, 4), 0.25)


def gated(x: Tensor) -> Any:
    def product(x: Tensor) -> dict[str, Any]:
        return {"a": [torch.mm(x, W)], "b": x.sum()}

    return torch.cond(x.sum() > 0, product, lambda x: {"a": [x.clone()], "b": x.sum()}, (x,))


def recurrent(x: Tensor) -> Any:
    def body(i: Tensor, state: dict[str, Tensor]) -> Any:
        return i + 1, {"h": torch.tanh(torch.mm(state["h"], W))}

    return torch.while_loop(lambda i, state: i < 3, body, (torch.tensor(0), {"h": x}))


@pytest.mark.parametrize("function", [gated, recurrent])
@pytest.mark.parametrize("way", ["eager", "compiled", "exported"])
def test_a_program_in_fp32_does_not_stop(function: Callable[[Tensor], Any], way: str) -> None:
    """Though one branch, or a loop's body, gives low precision."""
    torch.compiler.reset()

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Any:
            return function(x)

    def run() -> Any:
        if way == "exported":
            return torch.export.export(Model(), (X,)).module()(X)
        return (torch.compile(function, backend="eager") if way == "compiled" else function)(X)

    expected = run()
    with hmpx.convert(device_types={"cpu"}):
        torch.testing.assert_close(run(), expected, rtol=0.01, atol=0.01)
        with hmpx.disable_casts():
            torch.testing.assert_close(run(), expected, rtol=0, atol=0)


def test_a_loop_keeps_the_dtype_that_it_is_given() -> None:
    """Low precision, too."""

    def body(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, torch.softmax(x, -1)

    with hmpx.convert(device_types={"cpu"}):
        found = torch.while_loop(lambda i, x: i < 2, body, (torch.tensor(0), X.bfloat16()))
    assert found[1].dtype is torch.bfloat16
