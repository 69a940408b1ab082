"""`invariance`: each call repeated with other batches and threads."""

from __future__ import annotations

from .repeating import invariance
from .variations import Invariance, Variation

__all__ = ["Invariance", "Variation", "invariance"]
