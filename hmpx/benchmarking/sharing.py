"""Whether steps of several variants train one model, whose losses would then be nobody's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook


@contextlib.contextmanager
def trained() -> Iterator[list[Tensor]]:
    """Gives the parameters of the optimizers that step inside the block."""
    found: list[Tensor] = []

    def note(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        found.extend(each for group in optimizer.param_groups for each in group["params"])

    hook = register_optimizer_step_post_hook(note)
    try:
        yield found
    finally:
        hook.remove()
