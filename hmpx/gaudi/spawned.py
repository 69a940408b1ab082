"""Prepares a process that was started by spawn; `hmpx.gaudi.spawning` runs it there, by its path."""

from __future__ import annotations

import sys
from pathlib import Path


def _prepare(state: bytes) -> None:
    ours = str(Path(__file__).parent.parent.parent)
    sys.path.insert(0, ours)  # the same hmpx as the parent's, wherever that was found
    from hmpx.gaudi import spawning

    sys.path.remove(ours)
    spawning.restore(state)


if __name__ == "<run_path>":
    _prepare(globals()["state"])
