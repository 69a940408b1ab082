"""Finds the first op with finite inputs and a non-finite result."""

from __future__ import annotations

from .culprit import EarlierCall, Offence, Range
from .watcher import Watch, watch

__all__ = ["EarlierCall", "Offence", "Range", "Watch", "watch"]
