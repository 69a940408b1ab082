"""Prepares a process that was started by spawn; `hmpx.spawning` has it run there, by its path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def _prepare(state: bytes) -> None:
    if importlib.util.find_spec("hmpx") is None:
        sys.path.append(str(Path(__file__).parent.parent))
    from hmpx import spawning  # only now can it be found

    spawning.restore(state)


if __name__ == "<run_path>":
    _prepare(globals()["state"])
