"""What to do about waste: each fix once, with all that it does away with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .cells import clean, count, located, size
from .rows import Waste


class Fix(NamedTuple):
    """What to do, and about what.

    Attributes:
        fix: What to do, as a line to copy.
        bytes: Bytes that are then no longer written or kept.
        waste: What it does away with, that of most bytes first.
    """

    fix: str
    bytes: int
    waste: tuple[Waste, ...]

    @property
    def line(self) -> str:
        """The line to copy."""
        return clean(self.fix)

    @property
    def reason(self) -> str:
        """What it does away with, in a sentence."""
        first, *others = self.waste
        where = f" at {located(first.location)}" if first.location else ""
        often = f", {count(first.times)} times" if first.times > 1 else ""
        more = f", and {count(len(others))} more" if others else ""
        saved = f"{size(self.bytes)}: " if self.bytes > 0 else ""
        return f"{saved}{clean(first.kind)}, {clean(first.what)}{where}{often}{more}"

    @property
    def note(self) -> str:
        """What it costs, or ""."""
        return clean("; ".join(dict.fromkeys(each.note for each in self.waste if each.note)))


def fixes(waste: Iterable[Waste]) -> list[Fix]:
    """Returns what to do about ``waste``, the fixes that save most first."""
    found: dict[str, list[Waste]] = {}
    for each in waste:
        if each.fix:
            found.setdefault(each.fix, []).append(each)
    made = [
        Fix(
            fix,
            sum(each.bytes for each in several),
            tuple(sorted(several, key=lambda each: -each.bytes)),
        )
        for fix, several in found.items()
    ]
    return sorted(made, key=lambda each: -each.bytes)
