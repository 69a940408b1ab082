"""Warnings at the line of the user's program that called hmpx."""

from __future__ import annotations

import sys
import warnings
from typing import Final

from .errors import HmpxWarning
from .frames import PACKAGE

#: Packages whose frames stand between that line and the warning.
_BETWEEN: Final = frozenset({PACKAGE, "torch", "importlib", "_frozen_importlib"})


def warn(message: str) -> None:
    """Warns of something in the user's input."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _package(frame.f_globals) in _BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, HmpxWarning, stacklevel=level)


def _package(names: dict[str, object]) -> str:
    return str(names.get("__name__")).partition(".")[0]
