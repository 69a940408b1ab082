"""Places in programs: lines of code as messages show them, and where in a model an op is called."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple

from .errors import relative

PACKAGE: Final = str(__package__)
DIRECTORY: Final = Path(__file__).parent
#: Directories of installed packages, and where files begin that are not the user's.
_SITES: Final = ("site-packages", "dist-packages")
_INSTALLED: Final = (
    "<frozen ",
    "<hmpx.",
    f"{DIRECTORY}{os.sep}",
    f"{sysconfig.get_path('stdlib')}{os.sep}",
)


def is_ours(module: object) -> bool:
    """Whether ``module`` is the name of one of hmpx's modules or packages."""
    return str(module).partition(".")[0] == PACKAGE


def with_callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields ``frame`` and its callers, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


@functools.lru_cache(maxsize=1 << 12)
def is_installed(path: str) -> bool:
    """Whether a file belongs to Python, to an installed package or to hmpx."""
    return path.startswith(_INSTALLED) or any(f"{os.sep}{each}{os.sep}" in path for each in _SITES)


def own_line(location: str) -> str:
    """Returns the innermost line of the running code that is not installed; `location` if there is none, or it is that."""
    if not is_installed(location):
        return location
    for frame in with_callers(sys._getframe(1)):
        if not is_installed(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return location


def located(location: str) -> str:
    """Returns ``"path:line"``, relative to the program's directory or to where packages are installed."""
    location = relative(location)
    for directory in _SITES:
        location = location.rpartition(f"{os.sep}{directory}{os.sep}")[2]
    return location


class Place(NamedTuple):
    """Where in a model an op is called."""

    # Qualified name of the innermost running module; ``""`` in the outermost, and outside
    path: str = ""
    classes: tuple[str, ...] = ()  # Class names of the running modules, the outermost first
    training: bool | None = None  # Whether the innermost is in training mode; None outside of any
