"""Explains how a policy treats an op, why, and where."""

from __future__ import annotations

from .asking import explain, explanations
from .explanation import (
    Explanation,
    Explanations,
    call_sites,
    listable,
    matching,
    outcome,
    why_no_match,
)
