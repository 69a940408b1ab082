"""Errors of the user's step: which ones a benchmark survives, and how they are told."""

from __future__ import annotations

from typing import Final

from ..errors import said_by
from ..frames import located
from ..recording import raised_at

#: What ends a variant, but not the benchmark: `sys.exit` in a step would end it without a word.
FAILURES: Final = (Exception, SystemExit)


def told(error: BaseException) -> str:
    """Returns an error's class, its message, and the user's line that it came from, if known."""
    where = place_of(error)
    return f"{said_by(error)}, at {where}" if where else said_by(error)


def place_of(error: BaseException) -> str:
    """Returns the user's line that an error came from, ``"train.py:12"``; ``""`` if unknown."""
    where = raised_at(error)
    return located(where) if where else ""
