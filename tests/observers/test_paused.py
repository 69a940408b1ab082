"""Between the steps that a tool looks at, a converted program computes as without the tool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hmpx

pytestmark = pytest.mark.native

#: Tools that look at one step in three.
TOOLS: dict[str, Callable[[], Any]] = {
    "lint": lambda: hmpx.lint(every=3),
    "monitor": lambda: hmpx.monitor(every=3),
    "watch": lambda: hmpx.watch("collect", every=3),
}


def train(seen: list[torch.dtype]) -> list[Tensor]:
    """Trains a net for seven steps; notes the dtypes of results, and returns the parameters."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8))
    for each in net:
        each.register_forward_hook(lambda module, inputs, result: seen.append(result.dtype))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for _ in range(7):
        optimizer.zero_grad()
        (net(torch.randn(4, 8)).float() - 1).square().mean().backward()
        optimizer.step()
    return [each.detach() for each in net.parameters()]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "options", [{}, {"legalize": "always"}, {"low_precision_type": "float8_e4m3fn"}]
)
@pytest.mark.parametrize("tool", TOOLS)
def test_steps_between_keep_their_dtypes_and_bits(tool: str, options: dict[str, Any]) -> None:
    plain, seen = list[torch.dtype](), list[torch.dtype]()
    with hmpx.convert(device_types={"cpu"}, **options):
        expected = train(plain)
        with TOOLS[tool]():
            found = train(seen)
    assert seen == plain
    assert options or torch.bfloat16 in plain
    assert all(map(torch.equal, found, expected))
