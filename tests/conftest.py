"""Shared fixtures: after every test torch must be as it was before, by key and identity."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import hmpx
from hmpx import ops

torch.set_num_threads(1)  # tests run in parallel processes


def namespaces() -> dict[str, dict[str, object]]:
    """Returns a copy of ``vars()`` of every namespace that hmpx may patch."""
    return {name: dict(vars(owner)) for name, owner in ops.NAMESPACES.items()}


def differences(before: dict[str, dict[str, object]]) -> list[str]:
    """Returns the slots whose presence or identity differs from ``before``."""
    return [
        f"{name}.{key}"
        for name, now in namespaces().items()
        for key in (before[name].keys() | now.keys()) - {"__warningregistry__"}
        if before[name].get(key, differences) is not now.get(key, differences)
    ]


@pytest.fixture(autouse=True)
def torch_is_left_untouched() -> Iterator[None]:
    """Reverts after each test, then compares every patched namespace by key and identity."""
    before = namespaces()
    yield
    hmpx.revert()
    changed = differences(before)
    assert not changed, f"left patched: {changed}"
    assert not hmpx.casting.is_off()
    assert hmpx.casting._off_regions == 0
