"""Weights in formats with shared scales are kept as codes, whatever their values, in little memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hmpx

pytestmark = pytest.mark.native


class Many(nn.Module):
    """Layers of many random weights, some of them uniform, so that many values are the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 8, bias=False) for _ in range(60)])
        for seed, layer in enumerate(self.layers[::2]):
            torch.manual_seed(seed)
            nn.init.normal_(layer.weight, std=0.1 * (seed + 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers])


@pytest.mark.parametrize(
    ("name", "most"),
    [("nvfp4", 0.22), ("mxfp4_e2m1", 0.14), ("mxfp8_e4m3", 0.27), ("int8_row", 0.29)],
)
def test_all_are_stored_and_round_to_the_same_bits(name: str, most: float) -> None:
    model, x = Many().eval(), torch.randn(2, 32)
    policy = {"low": [f"linear {name} output=bfloat16"]}
    with hmpx.convert(policy=policy, device_types={"cpu"}):
        expected = model(x)
        with hmpx.freeze(model, x, store="codes"):
            assert torch.equal(model(x), expected)
            held = [each.untyped_storage().nbytes() for each in model.parameters()]
    assert max(held) <= most * 32 * 8 * 4
