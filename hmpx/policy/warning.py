"""Warnings that name the line of the user's program that called hmpx."""

from __future__ import annotations

import sys
import warnings

from ..errors import HmpxWarning
from ..frames import is_ours


def warn(message: str) -> None:
    """Warns of something in the user's input."""
    warnings.warn(message, HmpxWarning, stacklevel=_user_stack_level())


def _user_stack_level() -> int:
    """Returns the stack level of the first caller outside hmpx."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and is_ours(frame.f_globals.get("__package__")):
        level, frame = level + 1, frame.f_back
    return level
