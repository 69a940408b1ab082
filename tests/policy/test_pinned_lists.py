"""``lists="autocast-cuda@2.11"``: torch.autocast's lists as that version of torch has them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

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
