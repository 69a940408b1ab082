"""The phase of a long computation, which commands show on a terminal."""

from __future__ import annotations

from typing import Final

_ENTERED: Final = [""]


def enter(phase: str) -> None:
    """Notes the phase that begins."""
    _ENTERED[0] = phase


def entered() -> str:
    """Returns the current phase; ``""`` if none was noted."""
    return _ENTERED[0]
