"""Where in a model an op is called, as data. Knows nothing of how that is found out."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """Where in a model an op is called.

    Attributes:
        path: Qualified name of the innermost running module; ``""`` in the outermost, and outside.
        classes: Class names of the running modules, the outermost first.
        training: Whether the innermost is in training mode; None outside of any.
    """

    path: str = ""
    classes: tuple[str, ...] = ()
    training: bool | None = None
