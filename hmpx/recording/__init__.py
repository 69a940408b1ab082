"""Recording: what ran in which type, why, and at what cost."""

from __future__ import annotations

from .context import record

__all__ = ["record"]
