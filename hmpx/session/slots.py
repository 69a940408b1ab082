"""Switches many slots of torch between two sets of values, one namespace at a time, in C."""

from __future__ import annotations

import operator
import types
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import repeat
from typing import Any, Final

from ..patching import ABSENT, Change, EntryPatch, Patch, names_of

#: The values of a slot: without the conversion, and with it.
Values = tuple[Any, Any]

OUTSIDE: Final = 0
INSIDE: Final = 1


class _Namespace:
    """Many attributes of a module or a class."""

    def __init__(self, owner: Any, held: Mapping[str, Any], values: Mapping[str, Values]) -> None:
        self._owner, self._held = owner, held
        self._update = getattr(held, "update", None)  # classes' namespaces have none
        self._present: list[dict[str, Any]] = []
        self._absent: list[list[str]] = []
        self._get: list[Callable[[Any], Any]] = []
        for at in (OUTSIDE, INSIDE):
            present = {name: both[at] for name, both in values.items() if both[at] is not ABSENT}
            self._present.append(present)
            self._absent.append([name for name in values if name not in present])
            self._get.append(operator.itemgetter(*present) if present else lambda held: ())
        self._expected = [tuple(present.values()) for present in self._present]

    def references(self) -> Iterable[Any]:
        return *self._present[INSIDE].values(), *self._expected[INSIDE]

    def hold(self, at: int) -> bool:
        try:
            found = self._get[at](self._held)
        except KeyError:
            return False
        return found == self._expected[at] and not any(
            map(self._held.__contains__, self._absent[at])
        )

    def write(self, at: int) -> None:
        present, absent, held = self._present[at], self._absent[at], self._held
        if self._update is None:
            deque(map(setattr, repeat(self._owner), present, present.values()), 0)
            here = filter(held.__contains__, absent)
            deque(map(delattr, repeat(self._owner), here), 0)
        else:
            self._update(present)
            deque(map(held.pop, absent, repeat(None)), 0)  # type: ignore[attr-defined]


class _Names:
    """Attributes of many modules, classes and instances, few of each."""

    def __init__(self) -> None:
        self._all: list[tuple[Any, Mapping[str, Any], str, Values]] = []

    def add(self, owner: Any, held: Mapping[str, Any], values: Mapping[str, Values]) -> None:
        self._all += [(owner, held, name, both) for name, both in values.items()]

    def references(self) -> Iterable[Any]:
        return [both[INSIDE] for _, _, _, both in self._all]

    def hold(self, at: int) -> bool:
        return all(
            [held.get(name, ABSENT) is both[at] for _, held, name, both in self._all]  # noqa: C419
        )

    def write(self, at: int) -> None:
        for owner, held, name, both in self._all:
            if both[at] is not ABSENT:
                setattr(owner, name, both[at])
            elif name in held:
                delattr(owner, name)


class _Entries:
    """Entries of a set, or of a list, in front of the others."""

    def __init__(self, owner: Any, values: list[Any]) -> None:
        self._owner, self._values, self._is_list = owner, values, isinstance(owner, list)
        self._ids = frozenset(map(id, values))

    def references(self) -> Iterable[Any]:
        return self._values

    def hold(self, at: int) -> bool:
        found = self._ids.intersection(map(id, self._owner))
        return len(found) == (len(self._ids) if at else 0)

    def write(self, at: int) -> None:
        if not self._is_list:
            (self._owner.update if at else self._owner.difference_update)(self._values)
            return
        others = [each for each in self._owner if id(each) not in self._ids]
        self._owner[:] = [*reversed(self._values), *others] if at else others


class _Other:
    """Any other slot."""

    def __init__(self, patch: Change, values: Values) -> None:
        self._patch, self._values = patch, values

    def references(self) -> Iterable[Any]:
        return self._values[INSIDE:]

    def hold(self, at: int) -> bool:
        return self._patch.read() is self._values[at]

    def write(self, at: int) -> None:
        self._patch.write(self._values[at])


class Slots:
    """Slots that are written together, as one change of `patching.Draft`; `hold` says whether one may.

    Attributes:
        value: Where they are to be: `OUTSIDE` or `INSIDE`.
        at: Where they are.
    """

    is_foreign = False
    stays_idle = False
    where = "slots of a conversion"

    def __init__(self, changes: Iterable[tuple[Change, Values]]) -> None:
        """Takes patches of different slots, and their values; they are inside now."""
        self.value = self.at = INSIDE
        names: dict[int, tuple[Any, Mapping[str, Any], dict[str, Values]]] = {}
        entries: dict[int, tuple[Any, list[Any]]] = {}
        single = _Names()
        self._groups: list[_Namespace | _Names | _Entries | _Other] = [single]
        for patch, values in changes:
            if values[OUTSIDE] is values[INSIDE]:
                continue
            owner: Any = getattr(patch, "owner", None)
            held = _namespace(owner)
            if isinstance(patch, Patch) and held is not None:
                names.setdefault(id(owner), (owner, held, {}))[2][patch.attribute] = values
            elif isinstance(patch, EntryPatch):
                entries.setdefault(id(owner), (owner, []))[1].append(patch.value)
            else:
                self._groups.append(_Other(patch, values))
        self._groups += [_Entries(*each) for each in entries.values()]
        for owner, held, found in names.values():
            if len(found) < _MANY:
                single.add(owner, held, found)
            else:
                self._groups.append(_Namespace(owner, held, found))

    @property
    def key(self) -> Hashable:
        """Identifies them."""
        return id(self), "slots"

    def to(self, at: int) -> Slots:
        """Returns the change that brings them there."""
        self.value = at
        return self

    def references(self) -> Counter[int]:
        """Returns ``id`` of a value inside -> the number of references to it that this object has."""
        return Counter([id(each) for group in self._groups for each in group.references()])

    def hold(self) -> bool:
        """Whether all hold what they should: nobody else has written to them."""
        at = self.at
        return all(group.hold(at) for group in self._groups)

    def read(self) -> int:
        """Returns where they are."""
        return self.at

    def write(self, at: int) -> None:
        """Writes them all."""
        for group in self._groups:
            group.write(at)
        self.at = at


def _namespace(owner: Any) -> Mapping[str, Any] | None:
    """Returns the dict of ``owner``'s attributes; None if setting one has other effects."""
    set_attribute: Any = type(owner).__setattr__
    if set_attribute not in _PLAIN:
        return None
    if isinstance(owner, types.ModuleType):
        return names_of(owner)
    return getattr(owner, "__dict__", None)


_PLAIN: Final[tuple[Any, ...]] = (
    types.ModuleType.__setattr__,
    type.__setattr__,
    object.__setattr__,
)

#: So many are faster together.
_MANY: Final = 5
