"""Recording: what ran in which type, why, and at what cost."""

from __future__ import annotations

from .context import raised_at, record
from .folding import counted_rows
from .ledger import Ledger
from .recorder import Recorder

__all__ = ["Ledger", "Recorder", "counted_rows", "raised_at", "record"]
