"""Models with planted faults: exactly these ops are kept. Sound models keep nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmpx

from .planted import FAULTS, WIDTH, Planted, inputs


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", FAULTS)
def test_exactly_the_planted_ops_are_kept(name: str) -> None:
    """Also by module, in few evaluations; one at a time shows that each is needed."""
    planted = FAULTS[name]
    torch.manual_seed(1)
    model = planted.make()
    best = tuned(model, planted)
    assert best.keep_fp32 == planted.expected
    assert best.is_complete
    assert best.error <= planted.tolerance < best.all_low_error
    assert best.evaluations <= 4 + 3 * len(planted.expected)
    assert all(best.error_without(each) > planted.tolerance for each in best.keep_fp32)
    assert relative_error(model, best.policy) == pytest.approx(best.error)


def tuned(model: nn.Module, planted: Planted) -> hmpx.Tuned:
    return hmpx.tune(
        model,
        inputs(),
        tolerance=planted.tolerance,
        by=planted.by,
        low_precision_type=planted.low,
        device_types={"cpu"},
        progress=False,
    )


def relative_error(model: nn.Module, policy: hmpx.Policy) -> float:
    """Returns the error of a policy, measured without any of the search's code."""
    with torch.no_grad():
        expected = model(inputs())
        with hmpx.convert(policy=policy, device_types={"cpu"}, legalize="always"):
            found = model(inputs())
    return float((found.double() - expected).norm() / expected.double().norm())


class Attention(nn.Module):
    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / WIDTH**0.5
        if self.is_causal:
            mask = torch.ones(scores.shape, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(mask, float("-inf"))
        return self.out(scores.softmax(-1) @ v) + x


class Branches(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.linear = name, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        h = getattr(torch if hasattr(torch, self.name) else F, self.name)(self.linear(x))
        return {"both": (h, x), "sum": h.sum(-1)}


#: Looked up when called: functions that a tuple here held would not be wrapped.
ACTIVATIONS = (
    "relu", "gelu", "silu", "softplus", "elu", "hardswish", "mish", "tanh", "sigmoid", "selu",
    "leaky_relu", "sin",
)  # fmt: skip

SOUND = {
    **{each: lambda each=each: Branches(each) for each in ACTIVATIONS},
    "attention": lambda: Attention(False),
    "causal attention": lambda: Attention(True),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 4, 3), nn.GELU(), nn.Flatten()
    ),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", SOUND)
def test_sound_models_keep_nothing(name: str) -> None:
    """In at most four evaluations; module, gradients and random numbers are as before."""
    torch.manual_seed(2)
    model = SOUND[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    best = hmpx.tune(
        model, [inputs(), inputs() + 1], tolerance=0.02, device_types={"cpu"}, progress=False
    )
    assert best.keep_fp32 == frozenset()
    assert best.evaluations <= 4
    assert best.low_precision_flops_share == best.low_precision_bytes_share == 1
    assert torch.equal(state, torch.get_rng_state())
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert all(each.grad is None for each in model.parameters())
    assert not hmpx.is_converted()
