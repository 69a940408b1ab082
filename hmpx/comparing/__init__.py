"""Compares each call in low precision with float32, ranked by its effect on the result."""

from __future__ import annotations

from .comparing import compare
from .comparison import Comparison
from .rows import ComparedGradient, ComparedSite, Magnitudes

__all__ = ["ComparedGradient", "ComparedSite", "Comparison", "Magnitudes", "compare"]
