"""Runs scripts written for Gaudi: a stand-in for `habana_frameworks`, `"hpu"`, spawned processes."""

from __future__ import annotations

from .hmp import has_converted
from .shim import install
from .spawning import follow

__all__ = [
    "follow",
    "has_converted",
    "install",
]
