"""Which code is hmpx's own: messages name the user's lines instead, and tracebacks leave it out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Final

PACKAGE: Final = str(__package__)
DIRECTORY: Final = Path(__file__).parent


def is_ours(module: object) -> bool:
    """Whether ``module`` is the name of one of hmpx's modules or packages."""
    return str(module).partition(".")[0] == PACKAGE


def with_callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields ``frame`` and those that have called it, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back
