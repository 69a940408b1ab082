"""Devices whose speed in low precision is made up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hmpx.casting import legalized
from hmpx.compute import capabilities as capability
from hmpx.compute.capabilities import Capability


def known_as(patches: pytest.MonkeyPatch, answer: Callable[..., Capability]) -> None:
    """Has every device be as ``answer`` says of a kind of op, a device and a dtype."""
    patches.setattr(legalized, "known_capability", answer)


def measured_by(patches: pytest.MonkeyPatch, measure: Callable[..., Capability]) -> None:
    """Has ``measure`` answer in place of measurements."""
    patches.setattr(capability, "_measured", measure)
