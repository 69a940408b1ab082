"""`freeze`: stores in low precision the weights that a model only uses in low precision."""

from __future__ import annotations

from .freezing import Frozen, freeze
from .seal import is_sealed
from .weights import Weight

__all__ = [
    "Frozen",
    "Weight",
    "freeze",
    "is_sealed",
]
