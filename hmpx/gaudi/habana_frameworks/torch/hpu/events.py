"""``habana_frameworks.torch.hpu.events``."""

from __future__ import annotations

from .streams import Event

__all__ = ["Event"]
