"""Effects against what happens when one op alone is in low precision."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmpx

CPU = {"device_types": {"cpu"}}


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(size), nn.Linear(size, 3 * size), nn.Linear(size, size),
        )  # fmt: skip
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(torch.softmax(q @ k.transpose(-1, -2), -1) @ v)
        return x + self.down(F.gelu(self.up(x)))


def ranks(values):
    order = sorted(range(len(values)), key=values.__getitem__)
    found = [0.0] * len(values)
    for rank, index in enumerate(order):
        found[index] = float(rank)
    return torch.tensor(found)


def spearman(a, b):
    return torch.corrcoef(torch.stack([ranks(a), ranks(b)]))[0, 1].item()


def by_module(comparison, name):
    found = defaultdict(float)
    for row in comparison.rows:
        if row.cast_policy == "LOW":
            key = row.op, row.module
            found[key] = math.hypot(found[key], getattr(row, name))
    return dict(found)


def true_changes(model, x, keys, policy):
    """Returns the relative change of the outputs for each op of a module alone in low precision."""
    wanted = []

    def only(call):
        if (call.op, call.module) == wanted[0]:
            return hmpx.Decision(hmpx.ALLOW, output_dtype=torch.float32)
        return hmpx.DENY

    for op in {op for op, _ in keys}:
        hmpx.register_rule(op, level=10)(only)
    try:
        reference = model(x)
        found = {}
        for key in keys:
            wanted[:] = [key]
            with hmpx.convert(policy=policy, **CPU):
                found[key] = ((model(x) - reference).norm() / reference.norm()).item()
        return found
    finally:
        for op in {op for op, _ in keys}:
            hmpx.unregister_rule(op)


@pytest.mark.parametrize("low_type", [torch.bfloat16, torch.float16])
def test_effects_rank_as_the_truth_does(low_type):
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(*(Block(16) for _ in range(3)), nn.Linear(16, 8)),
        torch.randn(4, 12, 16),
    )
    model = model.requires_grad_(False)
    for index, module in enumerate(model.modules()):
        if isinstance(module, nn.Linear):  # as in trained models, layers matter unequally
            module.weight *= 1.5 ** (index % 5 - 2)
    policy = hmpx.Policy.from_ops(
        low=["linear", "matmul", "softmax", "layer_norm", "gelu"], low_precision_type=low_type
    )
    comparison = hmpx.compare(model, x, policy=policy, **CPU)
    effects = by_module(comparison, "effect")
    truth = true_changes(model, x, list(effects), policy)
    keys = list(effects)
    assert len(keys) == 25
    found = spearman([effects[key] for key in keys], [truth[key] for key in keys])
    assert found >= 0.9
    ratios = sorted(effects[key] / truth[key] for key in keys)
    assert 0.7 < ratios[len(ratios) // 2] < 1.4


# --- planted faults: the ops at fault come first ----------------------------------------------------------


def _offset(x):
    return (torch.exp(x) + 4096.0) - 4096.0


def _variance(x):
    x = x + 30.0
    return torch.sqrt(torch.mean(x * x, -1) - torch.square(torch.mean(x, -1)))


def _log_of_one(x):
    return torch.log(torch.add(1.0, x * 1e-4))


def _expm1(x):
    return torch.sub(torch.exp(x * 1e-3), 1.0)


def _angle(x):
    angles = torch.mul(torch.arange(4000.0, 4016.0), 0.37)
    return x * torch.sin(angles)


def _tiny(x):
    return torch.mul(torch.mul(x, 1e-6), 1e6)


def _huge(x):
    return torch.div(torch.exp(x + 11.5), torch.exp(x + 11.0))


FAULTS = {
    "an offset that cancels": (_offset, {"add", "sub"}, torch.bfloat16),
    "variance as a difference": (_variance, {"mul", "mean", "square", "sub"}, torch.bfloat16),
    "log near one": (_log_of_one, {"add", "log"}, torch.bfloat16),
    "exp less one": (_expm1, {"exp", "sub"}, torch.bfloat16),
    "an angle of many turns": (_angle, {"mul", "sin"}, torch.bfloat16),
    "underflow": (_tiny, {"mul"}, torch.float16),
    "overflow": (_huge, {"exp", "div"}, torch.float16),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_come_first(name):
    torch.manual_seed(0)
    fault, ops, low_type = FAULTS[name]
    before = nn.Linear(16, 16)

    def model(x):
        return fault(F.gelu(before(x)))

    policy = hmpx.Policy.from_ops(low=["linear", "gelu", *ops], low_precision_type=low_type)
    found = hmpx.compare(model, torch.randn(8, 16), policy=policy, **CPU)
    assert found.rows[0].op in ops
    others = max(row.effect for row in found.rows if row.op in ("linear", "gelu"))
    assert found.rows[0].effect > 2 * others
