"""`convert` and `revert`: one conversion of torch, and undo."""

from __future__ import annotations

from .converting import (
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
