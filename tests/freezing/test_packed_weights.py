"""Weights in formats with shared scales are kept as codes, whatever their values, in little memory."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
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


class Reader(nn.Module):
    """Reads one weight as an attribute, and others in ways that hide that it is one."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.by_name, self.listed, self.tied = (nn.Linear(32, 32) for _ in range(4))
        self.tied.weight = self.plain.weight
        self.kept = [self.listed.weight]
        self.several = nn.ParameterList([nn.Parameter(torch.randn(32, 32)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.tied(self.plain(x)) + F.linear(x, self.plain.weight)
        x = F.linear(x, self.by_name._parameters["weight"]) + F.linear(x, self.kept[0])
        return F.linear(F.linear(x, self.several[0]), dict(self.several.named_parameters())["1"])


@pytest.mark.parametrize("name", ["nvfp4", "int8_row"])
def test_weights_that_are_read_elsewhere_stay_float32(name: str) -> None:
    torch.manual_seed(0)
    model, x = Reader().eval(), torch.randn(2, 32)
    classes = [type(each) for each in model.modules()]
    held = {each: id(p) for each, p in model.named_parameters()}
    with hmpx.convert(policy={"low": [f"linear {name} output=bfloat16"]}, device_types={"cpu"}):
        expected = model(x)
        with hmpx.freeze(model, x, store="codes") as frozen:
            assert torch.equal(model(x), expected)
            assert torch.equal(copy.deepcopy(model)(x), expected)
    stored = {each.name: each.stored_dtype for each in frozen.weights if "weight" in each.name}
    assert [each for each, dtype in stored.items() if dtype is not torch.float32] == [
        "plain.weight", "tied.weight"
    ]  # fmt: skip
    reasons = {each.name: each.reason for each in frozen.weights}
    said = f"used in {name} only, read elsewhere than as an attribute of its module, but not stored as codes"
    assert reasons["listed.weight"] == reasons["by_name.weight"] == reasons["several.1"] == said
    assert reasons["several.0"] == f"used in {name} only"
    assert [type(each) for each in model.modules()] == classes
    assert {each: id(p) for each, p in model.named_parameters()} == held
