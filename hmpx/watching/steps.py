"""Steps that are watched cheaply and run again op by op after a failure, and those that a loss scaler skips."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import torch

from ..patches import SCALERS
from ..tensors import floating_in, node_of
from ..torch_state import state_of_random_numbers
from .gradients import sources_of
from .slots import Slots

#: A loss scaler may skip this share of so many steps; a scale below the floor no longer scales up.
_STEPS: Final = 200
_MOST_SKIPPED: Final = 0.05
_FLOOR: Final = 1.0


class Run:
    """One step as a function."""

    def __init__(
        self, closure: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._closure, self._args, self._kwargs = closure, args, kwargs
        self._state = self._random_state()

    def _random_state(self) -> Any:
        tensors = [*self._args, *self._kwargs.values()]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # the step may draw there
            tensors.append(torch.empty(0, device="cuda"))
        return state_of_random_numbers(tensors)

    def first(self) -> Any:
        """Runs the step."""
        return self._closure(*self._args, **self._kwargs)

    def again(self) -> Any:
        """Runs the step again with its first RNG state, then restores the current one."""
        now = self._random_state()
        self._state.restore()
        try:
            return self.first()
        finally:
            now.restore()

    @staticmethod
    def is_bad(result: Any) -> bool:
        """Whether the result, or a gradient behind it, is not finite; waits for devices."""
        results = floating_in(result.values() if isinstance(result, dict) else [result])
        slots = Slots()
        made = [node for each in results if (node := node_of(each)) is not None]
        leaves = {node.variable for node, _ in sources_of(made)}
        gradients = [each.grad for each in leaves if each.grad is not None]
        for tensor in (*results, *gradients):
            if tensor.layout is torch.strided:
                slots.measure(tensor)
        if isinstance(result, float) and not math.isfinite(result):
            return True
        return slots.read() is not None


class LossScaling:
    """The steps skipped by loss scalers, which sometimes make gradients overflow on purpose."""

    def __init__(self) -> None:
        self._skipped: deque[bool] = deque(maxlen=_STEPS)
        self._is_bad = False
        SCALERS.clear()

    def is_used(self) -> bool:
        """Whether a loss has been scaled since the watch began."""
        return any(scaler.is_enabled() for scaler in list(SCALERS))

    def is_lost(self) -> bool:
        """Records non-finite gradients; returns whether no scale helps."""
        self._is_bad = True
        if sum(self._skipped) + 1 > _MOST_SKIPPED * _STEPS:
            return True
        return any(scaler.is_enabled() and scaler.get_scale() < _FLOOR for scaler in list(SCALERS))

    def end_step(self) -> None:
        """Starts the next step."""
        if self.is_used():
            self._skipped.append(self._is_bad)
        self._is_bad = False
