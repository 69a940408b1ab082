"""`convert` and `revert`: one conversion of torch, and undo; `explain`: what it decides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..later import shown_later
from .converting import (
    about_run,
    casts_enabled,
    check_names,
    checked_policy,
    convert,
    is_converted,
    observable,
    refuse_where_off,
    restore,
    restoring,
    revert,
    unconverted,
)
from .session import Session
from .switching import current

if TYPE_CHECKING:
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
else:
    __getattr__ = shown_later(
        __name__,
        {
            "asking": "explain explanations",
            "explanation": "Explanation Explanations call_sites listable matching outcome why_no_match",
        },
    )
