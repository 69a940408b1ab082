"""``lists="autocast-cuda@2.11"``: torch.autocast's lists as that version of torch has them."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import hmpx
from hmpx import ops

#: Version -> device -> kind -> ops, or ops alone: as each torch registers them.
DATA: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "scripts" / "autocast_lists.json").read_text()
)
POLICIES = {"low": "LOW", "fp32": "FP32", "widest": "WIDEST"}


def policies(lists: str) -> dict[str, str]:
    """Returns op -> the name of its policy; without the ops that only follow their first input."""
    found = hmpx.load_policy(lists=lists).decisions.items()
    return {op: each.cast_policy.name for op, each in found if each.cast_policy.name != "FIRST"}


def registered(version: str, device: str) -> dict[str, str]:
    """Returns op -> the name of its policy in that torch; ``""`` where torch does not say it."""
    data = DATA[version][device]
    kinds = data if isinstance(data, dict) else {"": data}
    return {
        op: POLICIES.get(kind, "")
        for kind, names in kinds.items()
        for op in map(ops.resolve, names)
        if op is not None and ops.is_castable(op)
    }


@pytest.mark.parametrize("version", DATA)
@pytest.mark.parametrize("device", ["cuda", "cpu", "mps", "xpu"])
def test_lists_are_those_of_each_torch(device: str, version: str) -> None:
    listed = policies(f"autocast-{device}@{version}")
    for op, policy in registered(version, device).items():
        assert listed.get(op) == (policy or listed.get(op, "no policy")), op


@pytest.mark.parametrize("device", ["cuda", "cpu", "mps", "xpu"])
def test_lists_change_where_torch_changed_them(device: str) -> None:
    for one, two in itertools.pairwise(DATA):
        was, now = registered(one, device), registered(two, device)
        changed = {op for op in {*was, *now} if was.get(op) != now.get(op)}
        before, after = policies(f"autocast-{device}@{one}"), policies(f"autocast-{device}@{two}")
        differs = {op for op in {*before, *after} if before.get(op) != after.get(op)}
        assert differs <= changed
        assert all(ops.covering(op) is not None for op in changed - differs)  # by another line


def test_the_norm_that_became_fp32() -> None:
    """Torch 2.12 put rms_norm into its fp32 list, which broke released models."""
    before, after = policies("autocast-cuda@2.11"), policies("autocast-cuda@2.12")
    assert {op for op in after if before.get(op) != after[op]} == {"rms_norm"}
    assert hmpx.load_policy(policy={"lists": "autocast-cuda@2.11"}) == hmpx.load_policy(
        lists="autocast-cuda@2.11"
    )


@pytest.mark.parametrize("name", ["autocast-cuda@2.5", "autocast-cpu@3.0"])
def test_unknown_versions_are_refused(name: str) -> None:
    message = "the lists of torch 2.6 to 2.14 are known"
    with pytest.raises(hmpx.OptionError, match=message):
        hmpx.load_policy(lists=name)
    with pytest.raises(hmpx.PolicyFileError, match=message):
        hmpx.load_policy(policy={"lists": name})


# --- what broke when rms_norm became an fp32 op --------------------------------------------------


class VideoBlock(nn.Module):
    """Attention of normed queries and keys over the tokens of all frames, as in a released video model."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.norm = nn.RMSNorm(64, eps=1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (self.norm(q) * 0.7) @ (self.norm(k) * 0.7).mT
        return x + self.out(scores.softmax(-1) @ v)


def released_model(blocks: int = 4) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*[VideoBlock() for _ in range(blocks)])
    for each in model.parameters():
        nn.init.normal_(each, std=0.2)
    return model, torch.randn(2, 48, 64)


def test_a_released_model_keeps_its_results_under_the_lists_of_its_torch() -> None:
    """The slice was computed by hand, with the casts of torch 2.11."""

    def by_hand(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        low = {name: each.bfloat16() for name, each in block.named_parameters()}
        q, k, v = F.linear(x.bfloat16(), low["qkv.weight"], low["qkv.bias"]).chunk(3, -1)
        q, k = (block.norm(each.float()).bfloat16() for each in (q, k))
        weights = ((q * 0.7) @ (k * 0.7).mT).float().softmax(-1)
        return x + F.linear(weights.bfloat16() @ v, low["out.weight"], low["out.bias"])

    model, x = released_model()
    slice_ = functools.reduce(lambda x, block: by_hand(block, x), model, x)
    results = {}
    for version in ("2.11", "2.12"):
        with (
            torch.no_grad(),
            hmpx.convert(lists=f"autocast-cuda@{version}", device_types={"cpu"}, legalize="never"),
        ):
            results[version] = model(x)
    assert torch.equal(results["2.11"], slice_)
    drift = (results["2.12"] - slice_).norm() / slice_.norm()
    assert drift > 1e-3


def test_activations_take_more_bytes_since_the_norm_is_fp32() -> None:
    kept = {}
    for version in ("2.11", "2.12"):
        model = nn.Sequential(nn.Linear(64, 256), nn.RMSNorm(256), nn.SiLU(), nn.Linear(256, 8))
        saved: list[torch.Tensor] = []
        with (
            hmpx.convert(lists=f"autocast-cuda@{version}", device_types={"cpu"}),
            saved_tensors_hooks(
                lambda each, saved=saved: saved.append(each) or each, lambda each: each
            ),
        ):
            model(torch.randn(512, 64))
        kept[version] = sum(
            {each.untyped_storage().data_ptr(): each.nbytes for each in saved}.values()
        )
    assert kept["2.12"] >= kept["2.11"] + 512 * 256 * 2
