"""The C sources of the kernels and the digest of their version; `hatch_build.py` runs this file alone."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Final

#: The file to compile.
SOURCE: Final = Path(__file__).with_name("rounding_kernels.c")

#: All source files of the kernels.
SOURCES: Final = (SOURCE, *sorted(SOURCE.parent.glob("*.h")))


@functools.cache
def digest() -> str:
    """Returns a digest that changes when the kernels' interface or results change."""
    found = hashlib.sha256()
    for path in SOURCES:
        content = path.read_bytes()
        found.update(len(content).to_bytes(8, "big") + content)
    return found.hexdigest()
