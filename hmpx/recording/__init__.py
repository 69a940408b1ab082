"""Recording: what ran in which type, why, and at what cost."""

from __future__ import annotations

from .context import record
from .folding import counted_rows
from .recorder import Recorder

__all__ = ["Recorder", "counted_rows", "record"]
