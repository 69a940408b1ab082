"""Traces of runs, and the difference of two of them."""

from __future__ import annotations

from .diffing import diff_runs
from .run_diff import RunDiff, RunDiffRow
from .tracing import trace

__all__ = ["RunDiff", "RunDiffRow", "diff_runs", "trace"]
