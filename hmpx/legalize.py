"""bfloat16 as numpy arrays. The public namespace ``hmpx.legalize``; defines nothing itself."""

from __future__ import annotations

from .number_formats import from_uint16, to_uint16

__all__ = ["from_uint16", "to_uint16"]
