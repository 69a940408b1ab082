"""Records which dtypes ops ran in, why, and at what cost."""

from __future__ import annotations

from .context import raised_at, record
from .memory import Ledger
from .recorder import Recorder
