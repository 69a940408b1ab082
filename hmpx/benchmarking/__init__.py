"""Benchmarks a user's own step in float32, under torch.autocast and under hmpx, in turns."""

from __future__ import annotations

from .benchmarking import bench
from .result import Bench, Measured, Quartiles
from .runner import VARIANTS

__all__ = ["VARIANTS", "Bench", "Measured", "Quartiles", "bench"]
