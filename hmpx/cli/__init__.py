"""The command line."""

from __future__ import annotations

from .program import main

__all__ = [
    "main",
]
