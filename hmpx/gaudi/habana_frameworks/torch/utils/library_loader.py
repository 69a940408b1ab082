"""``habana_frameworks.torch.utils.library_loader``: loads Habana's libraries; none is needed here."""

from __future__ import annotations

from typing import Any

from ...absent import unknown


def load_habana_module(*args: object) -> None:
    """Does nothing."""


def load_habana_profiler(*args: object) -> None:
    """Does nothing: torch.profiler shows what happens on the device."""


def is_habana_available() -> bool:
    """Returns True: another device stands in."""
    return True


is_habana_avaialble = is_habana_available  # an earlier spelling


def __getattr__(name: str) -> Any:
    raise unknown(__name__, name)
