"""The random numbers that calls draw next, kept and restored."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..tensors import tensors_in


@dataclass(frozen=True)
class RandomState:
    """The state of the generators that calls on some devices draw from.

    Attributes:
        cpu: That of the CPU.
        others: Device -> that of its own.
    """

    cpu: Tensor
    others: tuple[tuple[torch.device, Tensor], ...]

    def restore(self) -> None:
        """Has the next calls draw what was to be drawn then."""
        torch.set_rng_state(self.cpu)
        for device, state in self.others:
            torch.get_device_module(device).set_rng_state(state, device)


def state_of_random_numbers(values: Iterable[Any]) -> RandomState:
    """Returns the state for calls with these arguments."""
    devices = {tensor.device for tensor in tensors_in(values)}
    others = []
    for device in sorted(devices, key=str):
        if device.type in ("cpu", "meta"):
            continue
        module = torch.get_device_module(device)
        if hasattr(module, "get_rng_state"):
            others.append((device, module.get_rng_state(device)))
    return RandomState(torch.get_rng_state(), tuple(others))
