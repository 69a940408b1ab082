"""Which functions compute ops in number formats, as users have registered them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, TypeAlias

from ..registry import Registry

if TYPE_CHECKING:
    from .lowering import Lowering

#: Op and format -> device type -> the function.
Lowerings: TypeAlias = "Mapping[tuple[str, str], Mapping[str | None, Lowering]]"

LOWERINGS: Final[Registry[Lowerings]] = Registry({})
