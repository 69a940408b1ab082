"""Matches regular expressions in time that grows with pattern and name, whatever the pattern: without backtracking.

A matcher takes a name and the positions at which its part of the pattern may begin; it returns those where it may end.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Final

from ..errors import cut

_Matcher = Callable[[str, frozenset[int]], frozenset[int]]

_TOKEN: Final = re.compile(
    r"(?P<open>\((?:\?(?::|=|!|P<\w+>))?)|(?P<close>\))|(?P<bar>\|)"
    r"|(?P<repeat>(?:[*+?]|\{\d*,\d*\}|\{\d+\})\??)"
    r"|(?P<atom>\[\^?\]?(?:\\.|[^\\\]])*\]|\\(?:x..|u.{4}|[^\dxuUN])|[^\\])",
    re.DOTALL,
)

#: Groups in groups; each takes some of Python's stack.
_DEEPEST: Final = 20

_FLAGS: Final = re.compile(r"\(\?[ais]+\)")


def fullmatcher(pattern: str) -> Callable[[str], bool]:
    """Returns the predicate whether a name matches the whole pattern.

    Raises:
        re.error: It is not a regular expression, or has references, look-behind, atomic or possessive parts.
    """
    flags = re.compile(pattern).flags & (re.ASCII | re.IGNORECASE | re.DOTALL)
    start = _FLAGS.match(pattern)
    parser = _PatternParser(pattern, start.end() if start else 0, flags)
    whole = parser.alternatives()
    if parser.kind != "end":
        raise parser.error()
    return lambda name: len(name) in whole(name, frozenset({0}))


class _PatternParser:
    """Reads a pattern, token by token."""

    def __init__(self, pattern: str, at: int, flags: int) -> None:
        self._pattern, self._at, self._flags, self._depth = pattern, at, flags, 0
        self._next()

    def _next(self) -> str:
        text = getattr(self, "text", "")
        found = _TOKEN.match(self._pattern, self._at)
        self.kind = str(found and found.lastgroup) if self._at < len(self._pattern) else "end"
        self.text, self._at = (found[0], found.end()) if found else ("", self._at)
        return text

    def error(self) -> re.error:
        rest = self._pattern[self._at - len(self.text) :]
        return re.error(
            f"{cut(rest)!r} is more than characters, groups, alternatives, repetitions and lookaheads"
        )

    def alternatives(self) -> _Matcher:
        several = [self._sequence()]
        while self.kind == "bar":
            self._next()
            several.append(self._sequence())
        return lambda name, at: frozenset().union(*[each(name, at) for each in several])

    def _sequence(self) -> _Matcher:
        parts = list[_Matcher]()
        while self.kind in ("atom", "open"):
            part = self._part()
            if self.kind == "repeat":
                part = _repeated(part, self._next())
            parts.append(part)
        return lambda name, at: functools.reduce(lambda ends, each: each(name, ends), parts, at)

    def _part(self) -> _Matcher:
        text = self._next() if self.kind == "atom" else ""
        if text:
            atom = re.compile(text, self._flags)
            return lambda name, at: frozenset(
                [found.end() for each in at if (found := atom.match(name, each))]
            )
        opening = self._next()
        self._depth += 1
        inner = self.alternatives()
        if self.kind != "close" or self._depth > _DEEPEST:
            raise self.error()
        self._depth -= 1
        self._next()
        if opening not in ("(?=", "(?!"):
            return inner
        return lambda name, at: frozenset(
            [each for each in at if bool(inner(name, frozenset({each}))) is (opening == "(?=")]
        )


def _repeated(part: _Matcher, text: str) -> _Matcher:
    """Returns the matcher of a part that is repeated: ``"*"``, ``"{2,3}"``."""
    least, _, most = {"*": "0,", "+": "1,", "?": "0,1"}.get(text[0], text.strip("{}?")).partition(
        ","
    )
    first = int(least or 0)
    last = int(most) if most else first if "," not in text and text[0] == "{" else None

    def match(name: str, at: frozenset[int]) -> frozenset[int]:
        enough = len(name) + 1  # from then on further repetitions end at the same positions
        for _ in range(min(first, enough)):
            at = part(name, at)
        found, new = at, at
        for _ in range(enough if last is None else min(last - first, enough)):
            new = part(name, new) - found
            if not new:
                break
            found |= new
        return found

    return match
