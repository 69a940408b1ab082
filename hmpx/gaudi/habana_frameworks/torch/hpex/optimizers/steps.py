"""Code that the optimizers written here share: closures, gradients, settings and their ranges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

Closure: TypeAlias = Callable[[], Any] | None


class Configured(Optimizer):
    """An optimizer with settings of its own, which its copies keep."""

    _settings: ClassVar[tuple[str, ...]] = ()

    def __getstate__(self) -> dict[str, Any]:
        """Returns the complete state of the optimizer, for pickling and copying."""
        state = super().__getstate__()
        return {**state, **{name: getattr(self, name) for name in self._settings}}


def evaluated(closure: Closure) -> Any:
    """Returns the result of the closure, if there is one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def with_gradients(group: dict[str, Any]) -> list[Tensor]:
    """Returns the parameters of a group that have a gradient.

    Raises:
        RuntimeError: A gradient is sparse.
    """
    found = [p for p in group["params"] if p.grad is not None]
    if any(p.grad.is_sparse for p in found):
        raise RuntimeError(
            "this optimizer takes no sparse gradients; use torch.optim.SparseAdam, or sparse=False "
            "in the embedding"
        )
    return found


def check_not_negative(**values: float) -> None:
    """Checks arguments by name.

    Raises:
        ValueError: One is below 0, or NaN.
    """
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name} is {value}; it must be at least 0")
