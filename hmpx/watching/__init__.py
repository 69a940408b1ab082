"""Finds the first op with finite inputs and a non-finite result."""

from __future__ import annotations

from .offences import EarlierCall, Offence, Range
from .underflow import Underflow
from .watcher import Watch, watch

__all__ = ["EarlierCall", "Offence", "Range", "Underflow", "Watch", "watch"]
