"""``habana_frameworks.torch.utils.internal``."""

from __future__ import annotations

import os
from typing import Any

from ...absent import unknown


def is_lazy() -> bool:
    """Whether the environment asks for the lazy mode, which changes nothing here."""
    return os.environ.get("PT_HPU_LAZY_MODE", "1") == "1"


def __getattr__(name: str) -> Any:
    raise unknown(__name__, name)
