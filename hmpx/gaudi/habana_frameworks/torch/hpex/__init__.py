"""``habana_frameworks.torch.hpex``: Habana's extensions, HMP among them."""

from __future__ import annotations

from typing import Any

from ...absent import unknown


def __getattr__(name: str) -> Any:
    raise unknown(__name__, name)
