"""`convert` and `revert`: one conversion of torch, and undo."""

from __future__ import annotations

from .session import Session, casts_enabled, convert, current, is_converted, restore, revert

__all__ = [
    "Session",
    "casts_enabled",
    "convert",
    "current",
    "is_converted",
    "restore",
    "revert",
]
