"""Wrappers of torch's functions: generated, observed, decided by rules."""

from __future__ import annotations

from .by_rules import Maker, make_choosing_wrapper
from .source import hands_over
from .wrappers import (
    in_force,
    make_completed_wrapper,
    make_observed_wrapper,
    make_wrapper,
    make_wrapper_where_lacking,
    retirement,
)

__all__ = [
    "Maker",
    "hands_over",
    "in_force",
    "make_choosing_wrapper",
    "make_completed_wrapper",
    "make_observed_wrapper",
    "make_wrapper",
    "make_wrapper_where_lacking",
    "retirement",
]
