"""Regular expressions of policy files, matched in polynomial time.

Python's `re` backtracks, which can take exponential time. This matcher follows all alternatives at once, as
a set of positions in the text. It rejects features that need backtracking: backreferences, lookbehind,
atomic groups and possessive quantifiers.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Final

try:
    from re import _compiler, _constants, _parser  # type: ignore[attr-defined]
except ImportError:  # before Python 3.11
    import sre_compile as _compiler
    import sre_constants as _constants
    import sre_parse as _parser

#: Maps the positions where a part of an expression may begin to the positions where it may end.
_Step = Callable[[str, frozenset[int]], frozenset[int]]

_REFUSED: Final = {
    _constants.GROUPREF: "a backreference",
    _constants.GROUPREF_EXISTS: "a condition on a group",
}


class Regex:
    """A regular expression that must match a whole text."""

    def __init__(self, pattern: str) -> None:
        """Reads the expression."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                re.compile(pattern)
                parsed = _parser.parse(pattern)
            self._step = _sequence(parsed, parsed.state.flags, parsed.state)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"not a regular expression: {error}") from None

    def matches(self, text: str) -> bool:
        """Whether the whole text matches."""
        return len(text) in self._step(text, frozenset([0]))


@functools.lru_cache(maxsize=1 << 12)
def compiled(pattern: str) -> Regex:
    """Returns a regular expression, read once."""
    return Regex(pattern)


def _sequence(nodes: Iterable[Any], flags: int, state: Any) -> _Step:
    steps = [_step(node, flags, state) for node in nodes]

    def run(text: str, starts: frozenset[int]) -> frozenset[int]:
        for each in steps:
            if not starts:
                break
            starts = each(text, starts)
        return starts

    return run


def _step(node: Any, flags: int, state: Any) -> _Step:
    op, value = node
    if op is _constants.BRANCH:
        steps = [_sequence(each, flags, state) for each in value[1]]
        return lambda text, starts: frozenset().union(*(each(text, starts) for each in steps))
    if op is _constants.SUBPATTERN:
        _, added, removed, inside = value
        return _sequence(inside, (flags | added) & ~removed, state)
    if op in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
        least, most, inside = value
        return _repeat(_sequence(inside, flags, state), int(least), int(most))
    if op in (_constants.ASSERT, _constants.ASSERT_NOT) and value[0] > 0:
        ahead, is_wanted = _sequence(value[1], flags, state), op is _constants.ASSERT
        return lambda text, starts: frozenset(
            at for at in starts if bool(ahead(text, frozenset([at]))) is is_wanted
        )
    if op in _SINGLE:
        single = _compiler.compile(_parser.SubPattern(state, [node]), flags)
        return lambda text, starts: frozenset(
            found.end() for at in starts if (found := single.match(text, at))
        )
    what = _REFUSED.get(op, "lookbehind, or an atomic or possessive part,")
    raise ValueError(f"{what} is not supported; remove it, or use `module` with a glob")


#: Nodes that match at most one character, in one way.
_SINGLE: Final = frozenset(
    getattr(_constants, name) for name in ("LITERAL", "NOT_LITERAL", "ANY", "IN", "AT")
)


def _repeat(inside: _Step, least: int, most: int) -> _Step:
    def run(text: str, starts: frozenset[int]) -> frozenset[int]:
        for _ in range(least):
            before, starts = starts, inside(text, starts)
            if starts == before:
                break
        found, new, count = starts, starts, least
        while new and count < most:
            new = inside(text, new) - found
            found |= new
            count += 1
        return found

    return run
