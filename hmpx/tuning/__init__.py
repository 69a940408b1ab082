"""Tuning: finds the smallest set of ops to keep in fp32, and proves it."""

from __future__ import annotations

from .checking import Check
from .result import Tuned
from .task import tune
