"""A step that is watched cheaply, and run again op by op once it fails."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..tensors import edges_of, floating_in, node_of
from ..torch_state import state_of_random_numbers
from .slots import Slots


class Flag:
    """One step, and whether anything that comes out of it is not finite."""

    def __init__(
        self, closure: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Prepares ``closure(*args, **kwargs)``."""
        self._closure, self._args, self._kwargs = closure, args, kwargs
        self._state = state_of_random_numbers([*_accelerators(), *args, *kwargs.values()])

    def run(self) -> Any:
        """Runs the step."""
        return self._closure(*self._args, **self._kwargs)

    def run_again(self) -> Any:
        """Runs the step on the random numbers that it was first run on; restores those that come next."""
        now = state_of_random_numbers([*_accelerators(), *self._args, *self._kwargs.values()])
        self._state.restore()
        try:
            return self.run()
        finally:
            now.restore()

    @staticmethod
    def is_raised(result: Any) -> bool:
        """Whether the result, or a gradient behind it, is not finite; waits for devices."""
        results = floating_in(result.values() if isinstance(result, dict) else [result])
        slots = Slots()
        for tensor in (*results, *_gradients(results)):
            if tensor.layout is torch.strided:
                slots.measure(tensor)
        if isinstance(result, float) and not math.isfinite(result):
            return True
        return slots.read() is not None


def _gradients(results: list[Tensor]) -> list[Tensor]:
    """Returns the gradients of the leaves that ``results`` were computed from."""
    pending: list[Any] = [made for each in results if (made := node_of(each)) is not None]
    seen: set[Any] = set(pending)
    found: list[Tensor] = []
    while pending:
        node: Any = pending.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor) and variable.grad is not None:
            found.append(variable.grad)
        for following, _ in edges_of(node):
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
    return found


def _accelerators() -> list[Tensor]:
    """Returns a tensor on the accelerator in use, if any, whose random numbers a step may draw."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return [torch.empty(0, device="cuda")]
    return []
