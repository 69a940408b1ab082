"""The phase of a long computation, which commands show on a terminal."""

from __future__ import annotations

from typing import Final

_ENTERED: Final = [""]


def enter(phase: str) -> None:
    """Notes what the process does from here on."""
    _ENTERED[0] = phase


def entered() -> str:
    """Returns what it does; ``""`` if nothing was noted."""
    return _ENTERED[0]
