"""Plans the cost of a training step on tensors without values."""

from __future__ import annotations

from .planning import plan
from .result import PerRank, Plan, Run

__all__ = ["PerRank", "Plan", "Run", "plan"]
