"""Lint: calls of a running program that lose precision or time, each measured, with a remedy."""

from __future__ import annotations

from .findings import RULES, Finding, as_github, as_json, as_sarif
from .linting import Lint, lint
from .rules import siblings

__all__ = ["RULES", "Finding", "Lint", "as_github", "as_json", "as_sarif", "lint", "siblings"]
