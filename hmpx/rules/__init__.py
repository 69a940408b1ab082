"""Functions that users register to decide the calls of an op."""

from __future__ import annotations

from .judging import MOST_VERDICTS, Judge
from .registration import (
    RULES,
    Registered,
    all_rules,
    are_alike,
    register_rule,
    registered,
    unregister_rule,
)
