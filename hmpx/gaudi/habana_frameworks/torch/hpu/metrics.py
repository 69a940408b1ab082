"""``habana_frameworks.torch.hpu.metrics``: counts of what Gaudi's graph compiler does."""

from __future__ import annotations

from typing import Any

from ...absent import absent, unknown


def __getattr__(name: str) -> Any:
    if name in ("metric_global", "metric_localcontext", "metrics_dump"):
        return absent(__name__, name, "measure with torch.profiler")
    raise unknown(__name__, name)
