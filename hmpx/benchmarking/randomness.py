"""Random generators: each variant draws the numbers that it would draw if it ran alone."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch


class Randomness:
    """The state of all generators that one variant draws from: Python's, torch's, numpy's."""

    def __init__(self, device_type: str, seed: int) -> None:
        """Starts from ``seed``, without changing anything yet."""
        self._device_type, self._seed = device_type, seed
        self._state: tuple[Any, ...] | None = None

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Draws from the variant's generators inside the block, from the user's after it."""
        outside = _state(self._device_type)
        if self._state is None:
            set_seed(self._seed)
        else:
            _restore(self._device_type, self._state)
        try:
            yield
        finally:
            self._state = _state(self._device_type)
            _restore(self._device_type, outside)


def set_seed(seed: int) -> None:
    """Lets all generators begin with ``seed``, below 2**32."""
    torch.manual_seed(seed)  # of all devices
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def _state(device_type: str) -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    device = _device(device_type)
    return (
        random.getstate(),
        torch.get_rng_state(),
        None if numpy is None else numpy.random.get_state(),
        None if device is None else device.get_rng_state(),
    )


def _restore(device_type: str, state: tuple[Any, ...]) -> None:
    of_python, of_torch, of_numpy, of_device = state
    random.setstate(of_python)
    torch.set_rng_state(of_torch)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)
    device = _device(device_type)
    if of_device is not None and device is not None:
        device.set_rng_state(of_device)


def _device(device_type: str) -> Any:
    """Returns torch's module of an accelerator that is in use; None for the CPU."""
    if device_type == "cpu":
        return None
    module: Any = torch.get_device_module(device_type)
    is_initialized = getattr(module, "is_initialized", lambda: True)
    return module if hasattr(module, "get_rng_state") and is_initialized() else None
