"""A policy file after reading: lists and conditions, before anything is decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..decisions import FormatOptions, LowType
from ..lists.op_list import Entry, OpList
from ..lists.sets import DEFAULT_SET


@dataclass(frozen=True)
class SectionSource:
    """One section as it is written.

    Attributes:
        lists: Name in `lists.kinds.KEYS` -> op list.
        conditions: Key in `conditions.CONDITIONS` -> value.
        low_precision_type: Of its lists; None for that of the file.
        where: ``"policy.yaml:12"``.
    """

    lists: Mapping[str, OpList]
    conditions: Mapping[str, Any]
    low_precision_type: LowType | None
    where: str


@dataclass(frozen=True)
class PolicySource:
    """A policy file after reading.

    Attributes:
        lists: Name in `lists.kinds.KEYS` -> ops added to that list.
        removed: Name in `lists.kinds.KEYS` -> the lines that take ops out of the shipped list.
        base: The shipped set, or a directory; None for none.
        low_precision_type: None if the file names none.
        formats: What it says of all ops in number formats.
        sections: In their order.
        is_verbose: Whether the file asks for logging.
        notes: Messages to the user.
        where: The file.
    """

    lists: Mapping[str, OpList] = field(default_factory=dict)
    removed: Mapping[str, tuple[Entry, ...]] = field(default_factory=dict)
    base: str | None = DEFAULT_SET
    low_precision_type: LowType | None = None
    formats: FormatOptions = field(default_factory=FormatOptions)
    sections: tuple[SectionSource, ...] = ()
    is_verbose: bool = False
    notes: tuple[str, ...] = ()
    where: str = ""

    def op_lists(self) -> list[OpList]:
        """Returns all the lists in it."""
        return [*self.lists.values(), *[o for each in self.sections for o in each.lists.values()]]
