"""Warnings at lines of the user's program: hmpx's own, and torch's that would name a line of hmpx."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Final

from .errors import HmpxWarning
from .places import PACKAGE, is_ours, with_callers

#: Packages whose frames stand between that line and the warning.
_BETWEEN: Final = frozenset({PACKAGE, "torch", "importlib", "_frozen_importlib"})


def warn(message: str) -> None:
    """Warns about something in the user's input."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _name(frame).partition(".")[0] in _BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, HmpxWarning, stacklevel=level)


Show = Callable[[warnings.WarningMessage], None]


def relocating(show: Show) -> Show:
    """Returns a replacement of ``warnings._showwarnmsg`` that moves torch's warnings to the user's line.

    torch counts frames to find that line, and wrappers add frames. The warning is issued again at the frame
    that torch would find without hmpx, so that filters by module apply.

    Args:
        show: The function to replace.
    """
    moved: set[int] = set()

    def show_at_users_line(message: warnings.WarningMessage) -> None:
        key = id(message.message)
        is_own = key in moved or issubclass(message.category, HmpxWarning)
        frame = None if is_own else _without_hmpx(message)
        if frame is None:
            show(message)
            return
        moved.add(key)
        try:
            warnings.warn_explicit(
                message.message,
                message.category,
                frame.f_code.co_filename,
                frame.f_lineno,
                _name(frame),
                frame.f_globals.setdefault("__warningregistry__", {}),
                source=message.source,
            )
        finally:
            moved.discard(key)

    return show_at_users_line


def _without_hmpx(message: warnings.WarningMessage) -> FrameType | None:
    """Returns the frame that ``message`` would name without hmpx; None if it already names it."""
    frames = list(with_callers(sys._getframe(2)))
    places = [(frame.f_code.co_filename, frame.f_lineno) for frame in frames]
    if (message.filename, message.lineno) not in places:
        return None
    level = places.index((message.filename, message.lineno))
    if not any(is_ours(_name(frame)) for frame in frames[: level + 1]):
        return None
    _forget(message, frames[level])
    without = [frame for frame in frames if not is_ours(_name(frame))]
    return without[min(level, len(without) - 1)] if without else None


def _forget(message: warnings.WarningMessage, frame: FrameType) -> None:
    """Removes ``message`` at ``frame`` from the registry of warnings that were shown."""
    given = str(message.message), message.category
    noted = frame.f_globals.get("__warningregistry__", {})
    for lineno in (message.lineno, 0):
        noted.pop((*given, lineno), None)
    vars(warnings).get("onceregistry", {}).pop(given, None)


def _name(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))
