"""Where the compiled nodes are, and for which torch; `hatch_build.py` runs this file alone."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent
SOURCE: Final = FOLDER / "nodes.cpp"
_SOURCES: Final = (SOURCE, FOLDER / "kernels.h")


def path_for(torch_version: str) -> Path:
    """Returns the path of the nodes for this version of torch, this Python, and the source as it is."""
    digest = hashlib.sha256(b"".join([each.read_bytes() for each in _SOURCES])).hexdigest()[:12]
    return FOLDER / f"nodes.torch-{torch_version}.{sysconfig.get_config_var('SOABI')}.{digest}.so"


def compiled() -> list[Path]:
    return sorted(FOLDER.glob("nodes.torch-*.so"))
