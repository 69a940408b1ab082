"""Patterns of modules' qualified names, and which of many match one."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from . import regexes


class Regexes:
    """Regular expressions for whole names."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """Takes the patterns, in their order."""
        self.patterns = patterns

    def near(self, name: str) -> Iterable[int]:
        """Returns the positions, ascending, of all patterns that may match ``name`` or a module around it."""
        return range(len(self.patterns))

    def match_around(self, name: str) -> bool:
        """Whether a pattern matches the module of that name, or one that it is in."""
        parts = name.split(".")
        names = ["", *[".".join(parts[: count + 1]) for count in range(len(parts))]]
        return any(
            self.matches(self.patterns[at], each) for at in self.near(name) for each in names
        )

    def matching(self, names: Iterable[str]) -> set[str]:
        """Returns the patterns that match one of these names."""
        found: set[str] = set()
        for name in names:
            tried = [self.patterns[at] for at in self.near(name)]
            found.update([each for each in tried if each not in found and self.matches(each, name)])
        return found

    @staticmethod
    def matches(pattern: str, name: str) -> bool:
        """Whether ``pattern`` matches the whole of ``name``."""
        return _regex_matches(pattern, name)


class Globs(Regexes):
    """Globs, in which ``*`` stands for any characters.

    Each is found by a part between dots that it needs, such as ``3`` in ``layer.3.*``: there may be one for
    each of thousands of modules.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        """Chooses the rarest part of each glob."""
        super().__init__(patterns)
        parts = [
            [part for part in each.split(".") if part and not _WILD & {*part}] for each in patterns
        ]
        counts = Counter(part for several in parts for part in several)
        self._by_part: dict[str, list[int]] = defaultdict(list)
        for at, several in enumerate(parts):
            self._by_part[min(several, key=counts.__getitem__, default="")].append(at)

    def near(self, name: str) -> Iterable[int]:
        """As in `Regexes`."""
        return sorted([at for part in {"", *name.split(".")} for at in self._by_part.get(part, ())])

    @staticmethod
    def matches(pattern: str, name: str) -> bool:
        """As in `Regexes`."""
        return _compiled(pattern).fullmatch(name) is not None


_WILD = frozenset("*?[")


@functools.lru_cache(maxsize=1 << 16)
def _regex_matches(pattern: str, name: str) -> bool:
    return regexes.compiled(pattern).matches(name)


@functools.lru_cache(maxsize=1 << 12)
def _compiled(glob: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(glob))
