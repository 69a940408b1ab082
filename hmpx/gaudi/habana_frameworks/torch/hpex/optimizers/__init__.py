"""``habana_frameworks.torch.hpex.optimizers``: Habana's fused optimizers, with their arguments.

Torch's own where torch has them; LAMB and LARS as their papers define them.
"""

from __future__ import annotations

from typing import Any

from ....absent import unknown
from .lamb import FusedLamb
from .lars import FusedLars
from .momentum import FusedResourceApplyMomentum
from .of_torch import FusedAdagrad, FusedAdamW, FusedSGD

__all__ = [
    "FusedAdagrad",
    "FusedAdamW",
    "FusedLamb",
    "FusedLars",
    "FusedResourceApplyMomentum",
    "FusedSGD",
]


def __getattr__(name: str) -> Any:
    raise unknown(__name__, name)
