"""Records which dtypes ops ran in, why, and at what cost."""

from __future__ import annotations

from .context import raised_at as raised_at
from .context import record as record
from .memory import Ledger as Ledger
from .recorder import Recorder as Recorder
