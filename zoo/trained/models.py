"""All trained models."""

from __future__ import annotations

from collections.abc import Sequence

from . import atoms, pictures, sounds, text
from .task import Task


def tasks() -> Sequence[Task]:
    """Returns the models, whether their packages are installed or not."""
    return (*text.tasks(), *sounds.tasks(), *pictures.tasks(), *atoms.tasks())
