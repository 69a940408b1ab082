"""Plans the cost of a training step on tensors without values."""

from __future__ import annotations

from .planning import plan
from .result import Plan
from .sharding import PerRank
from .steps import Run

__all__ = ["PerRank", "Plan", "Run", "plan"]
