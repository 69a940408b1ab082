"""Reads op lists: text -> op names, each with its file and line.

One op per line, ``#`` comments, ``@hmp`` includes the shipped list of the same kind, ``-mul``
removes an op again, ``*`` means every op that no list names.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Iterable
from typing import Any, Final, NamedTuple, Protocol

from ... import ops
from ...errors import OpListError, shown
from .lines import parse_line, without_condition
from .op_list import MOST_KEPT, Entry, OpList

#: Torch has about a thousand ops, so no list that a person writes comes near.
_MOST_LINES: Final = 1_000_000

#: Each brings in a whole list.
_MOST_INCLUDES: Final = 100

_NO_OPTIONS: Final = Entry("", "").options()


class Shipped(Protocol):
    """The shipped lists that the lines of another list may refer to."""

    def included(self, name: str, kind: str, where: str, /) -> OpList:
        """Returns the list that the line ``@name`` brings in.

        Raises:
            OpListError: There is no such list.
        """

    def of_libraries(self) -> OpList:
        """Returns the ops of other libraries that any list may remove."""


def parse(
    text: str,
    source: str,
    kind: str,
    shipped: Shipped,
    *,
    is_shipped: bool = False,
    faults: list[OpListError] | None = None,
) -> OpList:
    """Returns the list that ``text`` holds.

    Args:
        text: The whole list.
        source: What error messages call it.
        kind: Name in `kinds.KINDS`.
        shipped: What its lines may refer to.
        is_shipped: The list comes with hmpx.
        faults: Where the errors of lines are put, which are then left out; None to raise the first.

    Raises:
        OpListError: A line is neither an op name, nor ``@set``, ``-op`` or ``*``; its options or its
            condition are not valid; or there are too many lines.
    """
    lines = text.removeprefix("\ufeff").splitlines()
    if len(lines) > _MOST_LINES:
        raise OpListError(
            f"{source}: {len(lines):,} lines are too many for an op list; at most {_MOST_LINES:,}"
        )
    contents = [line.partition("#")[0].strip() if "#" in line else line.strip() for line in lines]
    wheres = ((each, f"{source}:{number}") for number, each in enumerate(contents, start=1) if each)
    # Unlike a generator, which ends with its first error, these go on with the next line.
    applying = filter(operator.itemgetter(0), map(_applying, wheres))
    return from_lines(applying, kind, shipped, is_shipped=is_shipped, faults=faults)


def _applying(line: tuple[str, str]) -> tuple[str, str]:
    content, where = line
    return (without_condition(content, where), where) if ";" in content else line


def from_lines(
    lines: Iterable[tuple[str, str]],
    kind: str,
    shipped: Shipped,
    *,
    is_shipped: bool = False,
    faults: list[OpListError] | None = None,
) -> OpList:
    """Returns the list that these lines make, each given with its ``file:line``; the rest is as for `parse`.

    Raises:
        OpListError: As `parse`.
    """
    reading = _Reading(kind, shipped)
    remaining = iter(lines)
    while True:
        try:
            reading.add_all(remaining)
            break
        except OpListError as error:
            if faults is None:
                raise
            faults.append(error)
            if len(faults) == MOST_KEPT:
                where = str(error).partition(": ")[0]
                faults.append(OpListError(f"{where}: later lines are not read"))
                break
    return OpList(
        types.MappingProxyType(reading.found),
        tuple(reading.unknown),
        reading.unknown_count,
        tuple(reading.repeated),
        reading.repeated_count,
        frozenset(reading.removed),
        reading.everything,
        is_shipped,
    )


class _Parts(NamedTuple):
    """The parts of a line, apart from its place.

    Attributes:
        content: The name as written, with its prefix.
        start: Its first character.
        name: The op's name; None for an unknown one, ``@`` lines and ``*``.
        options: See `Entry.options`.
    """

    content: str
    start: str
    name: str | None
    options: tuple[Any, ...]

    @classmethod
    def of(cls, content: str, options: tuple[Any, ...]) -> _Parts:
        """Returns the parts of a line with this name and these options."""
        start = content[0]
        name = ops.names().get(content)
        if name is None and start not in "@*" and not content.isidentifier():
            name = ops.resolve(content.removeprefix("-"))
        is_castable = name is not None and ops.is_castable(name)
        return cls(content, start, name if is_castable else None, options)


class _Reading:
    """A list while it is read, line by line; reading a line takes no longer after many others."""

    def __init__(self, kind: str, shipped: Shipped) -> None:
        self.found: dict[str, Entry] = {}
        self.unknown: list[Entry] = []
        self.unknown_count = 0
        self.repeated: list[tuple[Entry, Entry]] = []
        self.repeated_count = 0
        self.removed: set[str] = set()
        self.everything: Entry | None = None
        self._kind, self._shipped = kind, shipped
        self._own: dict[str, Entry] = {}
        self._where: dict[str, str] = {}  # name as written -> the last line with it
        self._taken: dict[str, _Parts] = {}  # line -> its parts, for lines of more than a name
        self._options: dict[str, tuple[Any, ...]] = {}  # text after a name -> its options
        self._included: dict[str, OpList] = {}
        self._include_count = 0

    def add_all(self, lines: Iterable[tuple[str, str]]) -> None:
        """Adds lines, which are not empty without their comments.

        Raises:
            OpListError: As `parse`.
        """
        known, written, taken = ops.names(), self._where, self._taken
        for line, where in lines:
            is_bare = line.isidentifier()  # as nearly all are: there is nothing to parse
            if is_bare or (line[:1] not in "@-*" and " " not in line and line.isprintable()):
                earlier = written.get(line)
                written[line] = where
                name = known.get(line)
                if name is None and not is_bare:
                    name = ops.resolve(line)
                if name is None or not ops.is_castable(name):
                    self._note_unknown(line, where)
                elif name not in self._own or self._own[name].options() != _NO_OPTIONS:
                    self._add(name, Entry(line, where))
                if earlier is not None:
                    self._note_repeated(line, where, earlier)
            else:
                parts = taken.get(line)
                if parts is None:
                    parts = self._taken_apart(line, where)
                    if (
                        parts.name is not None or line == "*"
                    ):  # else there may be any number of them
                        taken[line] = parts
                self._add_parts(parts, where)

    def _taken_apart(self, line: str, where: str) -> _Parts:
        content, _, rest = line.partition(" ")
        options = self._options.get(rest)
        if options is None or content[:1] in "@-" or not content.isprintable():
            entry = parse_line(line, where, self._kind)
            if content == entry.text:  # else ``rest`` isn't all that follows the name
                self._options[rest] = entry.options()
            content, options = entry.text, entry.options()
        return _Parts.of(content, options)

    def _add_parts(self, parts: _Parts, where: str) -> None:
        content, name = parts.content, parts.name
        if parts.start == "@":
            self._include(content, where)
        elif parts.start == "-":
            self._remove(content, name, where)
        else:
            earlier = self._where.get(content)
            self._where[content] = where
            if earlier is not None:
                self._note_repeated(content, where, earlier)
            if content == "*":
                self.everything = Entry(content, where, *parts.options)
            elif name is None:
                self._note_unknown(content, where)
            elif name not in self._own or self._own[name].options() != parts.options:
                self._add(name, Entry(content, where, *parts.options))

    def _add(self, name: str, entry: Entry) -> None:
        own = self._own.get(name)
        if own is None:
            self.found[name] = self._own[name] = entry
            self.removed.discard(name)
        elif own.options() != entry.options():
            raise OpListError(
                f"{entry.where}: {shown(entry.text)} is the op {name!r}, which is "
                f"already in this list, at {own.where}, with other dtypes; keep one of the lines"
            )

    def _note_repeated(self, content: str, where: str, earlier: str) -> None:
        self.repeated_count += 1
        if self.repeated_count <= MOST_KEPT:
            self.repeated.append((Entry(content, where), Entry(content, earlier)))

    def _note_unknown(self, content: str, where: str) -> None:
        if "," in content:
            raise OpListError(f"{where}: expected one op per line, found {shown(content)}")
        why = ops.refusal(content.removeprefix("-"))
        if why:
            raise OpListError(f"{where}: {why}")
        self.unknown_count += 1
        if self.unknown_count <= MOST_KEPT:
            self.unknown.append(Entry(content, where))

    def _include(self, content: str, where: str) -> None:
        self._include_count += 1
        if self._include_count > _MOST_INCLUDES:
            raise OpListError(
                f"{where}: more than {_MOST_INCLUDES} @ lines in one list; "
                "one for each set is enough"
            )
        included = self._included.get(content)
        if included is None:
            included = self._included[content] = self._shipped.included(
                content[1:], self._kind, where
            )
        self.found.update({n: e for n, e in included.ops.items() if n not in self._own})
        self.removed |= included.removed - self.found.keys()
        self.everything = included.everything or self.everything

    def _remove(self, content: str, name: str | None, where: str) -> None:
        if name is None:
            self._note_unknown(content, where)
            return
        is_listed = self.found.pop(name, None) is not None
        is_there = is_listed or self.everything or self._is_covered(name)
        if not is_there and name not in self._shipped.of_libraries().ops:
            self._note_unknown(content, where)
        self._own.pop(name, None)
        self.removed.add(name)

    def _is_covered(self, name: str) -> bool:
        """Whether ``name`` is an operator of an op in the list."""
        covering: str | None = name
        while covering is not None:
            if covering in self.found:
                return True
            covering = ops.covering(covering)
        return False
