"""Watching: the first op whose inputs are finite and whose result is not."""

from __future__ import annotations

from .offences import EarlierCall, Offence, Range
from .underflow import Underflow
from .watcher import Watch, watch

__all__ = ["EarlierCall", "Offence", "Range", "Underflow", "Watch", "watch"]
