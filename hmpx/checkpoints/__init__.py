"""Checkpoints that servers load: writes a frozen model's weights as codes and scales, reads and checks such directories."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..later import shown_later

if TYPE_CHECKING:
    from .checking import read_checkpoint
    from .checkpoint import Checkpoint, CheckpointLayer
    from .loading import weights_for
    from .reading import is_checkpoint, read_config
    from .writing import save
else:  # only needed for number formats
    __getattr__ = shown_later(
        __name__,
        {
            "checkpoint": "Checkpoint CheckpointLayer",
            "checking": "read_checkpoint",
            "loading": "weights_for",
            "reading": "is_checkpoint read_config",
            "writing": "save",
        },
    )

__all__ = [
    "Checkpoint",
    "CheckpointLayer",
    "is_checkpoint",
    "read_checkpoint",
    "read_config",
    "save",
    "weights_for",
]
