"""Random numbers of an evaluation: those of its seed, whatever was drawn before."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def seed_all(seed: int) -> None:
    """Has torch, Python and NumPy, if it is loaded, draw the random numbers of a seed."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
