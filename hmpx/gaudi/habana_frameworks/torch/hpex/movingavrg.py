"""``habana_frameworks.torch.hpex.movingavrg``: a moving average of a model's weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from .....torch_state import disable_casts
from ...absent import unknown


class FusedEMA:
    """Keeps the moving average of a model's parameters and buffers, in a copy of the model.

    Attributes:
        ema: The copy.
        decay: Number of updates -> the fraction of the average that the next one keeps. It starts at
            0, so that early weights are soon forgotten.
        updates: How many updates there were.
    """

    def __init__(self, model: nn.Module, decay: float = 0.9999, updates: float = 0) -> None:
        """Copies ``model``.

        Raises:
            ValueError: ``decay`` is negative.
        """
        if not decay >= 0:
            raise ValueError(f"decay is {decay}; it must be at least 0")
        self.ema = copy.deepcopy(_bare(model)).eval()
        self.decay: Callable[[float], float] = lambda x: decay * (1 - math.exp(-x / 2000))
        self.updates = updates
        for parameter in self.ema.parameters():
            parameter.requires_grad_(False)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Moves the average towards ``model``."""
        self.updates += 1
        decay = self.decay(self.updates)
        current = _bare(model).state_dict()
        with disable_casts():
            for name, average in self.ema.state_dict().items():
                if average.dtype.is_floating_point:
                    average.mul_(decay).add_(current[name].detach(), alpha=1 - decay)

    def update_attr(
        self,
        model: nn.Module,
        include: Collection[str] = (),
        exclude: Collection[str] = ("process_group", "reducer"),
    ) -> None:
        """Copies the model's attributes; only those in ``include`` if it is not empty."""
        for name, value in vars(model).items():
            if name.startswith("_") or name in exclude or (include and name not in include):
                continue
            setattr(self.ema, name, value)


def _bare(model: nn.Module) -> nn.Module:
    if isinstance(model, (DataParallel, DistributedDataParallel)):
        inner: nn.Module = model.module
        return inner
    return model


def __getattr__(name: str) -> Any:
    raise unknown(__name__, name)
