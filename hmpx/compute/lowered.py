"""The registry of users' functions for ops in number formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, TypeAlias

from ..registry import Registry

if TYPE_CHECKING:
    from .lowering import Lowering

#: Op and format -> device type -> the function.
Lowerings: TypeAlias = "Mapping[tuple[str, str], Mapping[str | None, Lowering]]"

LOWERINGS: Final[Registry[Lowerings]] = Registry({})
