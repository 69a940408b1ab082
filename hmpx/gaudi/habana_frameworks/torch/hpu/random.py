"""``habana_frameworks.torch.hpu.random``: the device's random number generator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....devices import device_type
from ...absent import unknown

__all__ = [
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
]


def manual_seed(seed: int) -> None:
    """Seeds the device's generator with ``seed``."""
    if device_type() == "cuda":
        torch.cuda.manual_seed(int(seed))
    else:
        torch.manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seeds the generators of all devices with ``seed``."""
    if device_type() == "cuda":
        torch.cuda.manual_seed_all(int(seed))
    else:
        torch.manual_seed(int(seed))


def seed() -> int:
    """Seeds the device's generator with a random number, and returns that."""
    if device_type() != "cuda":
        return torch.seed()
    torch.cuda.seed()
    return torch.cuda.initial_seed()


def seed_all() -> None:
    """Seeds the generators of all devices with a random number."""
    if device_type() == "cuda":
        torch.cuda.seed_all()
    else:
        torch.seed()


def initial_seed() -> int:
    """Returns the seed of the device's generator."""
    return torch.cuda.initial_seed() if device_type() == "cuda" else torch.initial_seed()


def get_rng_state(device: Any = "hpu") -> torch.Tensor:
    """Returns the state of the device's generator."""
    return torch.cuda.get_rng_state() if device_type() == "cuda" else torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "hpu") -> None:
    """Sets the state of the device's generator."""
    if device_type() == "cuda":
        torch.cuda.set_rng_state(new_state)
    else:
        torch.set_rng_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """Returns the states of all devices' generators."""
    if device_type() == "cuda":
        return torch.cuda.get_rng_state_all()
    return [torch.get_rng_state()]


def set_rng_state_all(new_states: Sequence[torch.Tensor]) -> None:
    """Sets the states of all devices' generators."""
    if device_type() == "cuda":
        torch.cuda.set_rng_state_all(new_states)
    else:
        for state in new_states:
            torch.set_rng_state(state)


def __getattr__(name: str) -> Any:
    raise unknown(__name__, name)
