"""Tells number formats from other values, without importing their families for that."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from ..arguments import is_a

if TYPE_CHECKING:
    from .families import Format

_FAMILIES: Final = f"{__package__}.families"


def is_format(value: object) -> TypeGuard[Format]:
    """Whether ``value`` is a number format of any family."""
    families: Any = sys.modules.get(_FAMILIES)  # who has a format has imported them
    classes = getattr(families, "FORMATS", None)
    return classes is not None and is_a(value, classes)
