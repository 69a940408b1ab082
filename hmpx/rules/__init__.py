"""Functions that users register to decide the calls of an op."""

from __future__ import annotations

from .rules import (
    MOST_VERDICTS,
    RULES,
    Judge,
    Registered,
    all_rules,
    register_rule,
    registered,
    unregister_rule,
)

__all__ = [
    "MOST_VERDICTS",
    "RULES",
    "Judge",
    "Registered",
    "all_rules",
    "register_rule",
    "registered",
    "unregister_rule",
]
