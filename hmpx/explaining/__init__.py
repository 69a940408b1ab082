"""Explains how a policy treats an op, why, and where."""

from __future__ import annotations

from .asking import explain as explain
from .asking import explanations as explanations
from .explanation import Explanation as Explanation
from .explanation import Explanations as Explanations
from .explanation import call_sites as call_sites
from .explanation import listable as listable
from .explanation import matching as matching
from .explanation import outcome as outcome
from .explanation import why_no_match as why_no_match
