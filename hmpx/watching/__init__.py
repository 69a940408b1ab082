"""Finds the first op with finite inputs and a non-finite result."""

from __future__ import annotations

from .offences import EarlierCall, Offence, Range
from .optimizers import is_inner_step
from .step_repeats import stepped_in_fp32
from .trials import results_in_fp32
from .underflow import Underflow
from .watcher import Watch, watch

__all__ = [
    "EarlierCall",
    "Offence",
    "Range",
    "Underflow",
    "Watch",
    "is_inner_step",
    "results_in_fp32",
    "stepped_in_fp32",
    "watch",
]
