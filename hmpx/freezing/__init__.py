"""`freeze`: weights stored in the dtype that a model uses them in."""

from __future__ import annotations

from .freezing import Frozen, Weight, freeze

__all__ = [
    "Frozen",
    "Weight",
    "freeze",
]
