"""Sums of thousands of equal terms on the CPU, whose kernels for low precision add up in that and stop growing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hmpx

BF16, FP16 = torch.bfloat16, torch.float16

#: More terms than either type counts one by one.
COUNT = 5000
HUB = torch.zeros(COUNT, dtype=torch.long)

SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "index_add": lambda x: x.new_zeros(1).index_add(0, HUB, x),
    "index_add_": lambda x: x.new_zeros(1).index_add_(0, HUB, x),
    "index_put": lambda x: x.new_zeros(1).index_put((HUB,), x, accumulate=True),
    "index_put_": lambda x: x.new_zeros(1).index_put_((HUB,), x, True),
    "put": lambda x: x.new_zeros(1).put(HUB, x, accumulate=True),
    "histc": lambda x: torch.histc(x, 1, 0, 2),
}


@pytest.mark.parametrize("options", [{}, {"lists": "autocast-cuda"}, {"policy": {"lists": "none"}}])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_sums_go_on_growing(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Under any list; torch's kernels stop at 256 in bfloat16, at 2,048 in float16."""
    if "policy" not in options:
        options = {**options, "low_precision_type": dtype}
    with hmpx.convert(**options):
        found = {name: call(torch.ones(COUNT, dtype=dtype)).item() for name, call in SUMS.items()}
    assert found == dict.fromkeys(found, float(torch.tensor(COUNT, dtype=dtype)))


def test_an_assignment_by_index_is_left_to_torch() -> None:
    """It adds nothing up, and its target is not upcast."""
    target = torch.zeros(1 << 16, 2, dtype=BF16)
    with hmpx.convert(), torch.profiler.profile(profile_memory=True) as profile:
        target.index_put_((HUB[:3],), target.new_ones(3, 2))
        target[HUB[:3]] = 1
    assert all(event.self_cpu_memory_usage < target.nbytes for event in profile.events())
    assert target[0].tolist() == [1, 1]
