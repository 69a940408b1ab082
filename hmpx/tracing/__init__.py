"""`trace` and `diff_runs`: runs compared tensor by tensor; `invariance`: calls repeated in other batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..later import shown_later
from .diffing import diff_runs
from .run_diff import RunDiff, RunDiffRow
from .tracing import trace

if TYPE_CHECKING:
    from .repeating import invariance
    from .variations import Invariance, Variation
else:
    __getattr__ = shown_later(
        __name__, {"repeating": "invariance", "variations": "Invariance Variation"}
    )

__all__ = ["Invariance", "RunDiff", "RunDiffRow", "Variation", "diff_runs", "invariance", "trace"]
