"""Which code is hmpx's own: messages name the user's lines instead, and tracebacks leave it out."""

from __future__ import annotations

from pathlib import Path
from typing import Final

PACKAGE: Final = str(__package__)
DIRECTORY: Final = Path(__file__).parent


def is_ours(module: object) -> bool:
    """Whether ``module`` is the name of one of hmpx's modules or packages."""
    return str(module).partition(".")[0] == PACKAGE
