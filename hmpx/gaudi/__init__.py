"""Runs scripts written for Gaudi: a stand-in for `habana_frameworks`, `"hpu"`, spawned processes."""

from __future__ import annotations

from .shim import has_converted, install
from .spawning import follow

__all__ = [
    "follow",
    "has_converted",
    "install",
]
