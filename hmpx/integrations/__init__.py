"""Plugins for training frameworks, each imported by name; a stand-in for `habana_frameworks`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..later import shown_later

if TYPE_CHECKING:
    from .hpex import has_converted
    from .shim import install
    from .spawning import follow
else:
    __getattr__ = shown_later(
        __name__, {"hpex": "has_converted", "shim": "install", "spawning": "follow"}
    )
