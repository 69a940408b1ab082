"""Replaces attributes, and restores them exactly, all of them or none.

Changes are drafted first: a `Draft` holds the new values of slots while torch stays unchanged. `Draft.make`
then writes them, and undoes everything if anything raises meanwhile. Undo deletes slots that a patch
created, and restores the old values of others. It leaves slots alone that somebody else has patched since.
"""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Callable, Collection, Hashable, Iterable, KeysView, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from .errors import raised_here

if TYPE_CHECKING:
    from typing_extensions import TypeVarTuple, Unpack

    _Functions = TypeVarTuple("_Functions")

_NAMES: Final[Any] = vars(types.ModuleType)["__dict__"]


def names_of(module: types.ModuleType) -> dict[str, Any]:
    """Returns the module's names and their values, even if its class overrides ``__dict__``."""
    names: dict[str, Any] = _NAMES.__get__(module)
    return names


#: How the names of hmpx's modules begin.
_OWN: Final = f"{__name__.partition('.')[0]}."

#: The value of an empty slot.
ABSENT: Final[Any] = type("absent", (), {"__repr__": lambda self: "ABSENT"})()


def unpatched(*functions: Unpack[_Functions]) -> tuple[Unpack[_Functions]]:
    """Returns torch's own functions, without hmpx's wrappers.

    For modules that keep functions in their globals, and may be imported while torch is patched.

    Example:
        >>> with hmpx.convert(device_types={"cpu"}):
        ...     (mm,) = hmpx.patching.unpatched(torch.mm)
        >>> mm is torch.mm
        True
    """

    def is_torchs(function: Any) -> bool:
        is_python = type(function) is types.FunctionType
        return not (is_python and function.__globals__["__name__"].startswith(_OWN))

    return tuple([inspect.unwrap(f, stop=is_torchs) for f in functions])  # type: ignore[arg-type]


class Patch(NamedTuple):
    """A value to put at ``owner.attribute``, for a module, a class, an instance or a closure's cell."""

    owner: Any
    attribute: Any
    value: Any
    stays_idle: bool = False  # It may stay below somebody else's patch: it no longer does anything
    is_foreign: bool = False  # The slot is the user's: it may reject the value, or change any time

    @property
    def key(self) -> Hashable:
        """Identifies the slot."""
        return id(self.owner), type(self), self.attribute

    @property
    def where(self) -> str:
        """The slot's name, for messages."""
        owner = self.owner
        if isinstance(owner, types.ModuleType):
            return f"{owner.__name__}.{self.attribute}"
        cls = owner if isinstance(owner, type) else type(owner)
        return f"{cls.__module__}.{cls.__qualname__}.{self.attribute}"

    def read(self) -> Any:
        """Returns the slot's own value, which is not inherited; `ABSENT` if it holds none."""
        return _own(self.owner, self.attribute)

    def write(self, value: Any) -> None:
        """Stores ``value`` in the slot; `ABSENT` empties it."""
        if value is not ABSENT:
            setattr(self.owner, self.attribute, value)
        elif self.read() is not ABSENT:
            delattr(self.owner, self.attribute)


def _own(owner: Any, attribute: str) -> Any:
    if isinstance(owner, type):
        return owner.__dict__.get(attribute, ABSENT)
    if issubclass(type(owner), types.ModuleType):
        return names_of(owner).get(attribute, ABSENT)
    own = getattr(owner, "__dict__", None)
    if own is None or type(owner) is types.FunctionType:
        return getattr(owner, attribute, ABSENT)
    return own.get(attribute, ABSENT)


class ItemPatch(Patch):
    """A value to put at ``owner[attribute]``, an item of a dict or a list."""

    __slots__ = ()

    @property
    def where(self) -> str:
        """The slot's name, for messages."""
        key = getattr(self.attribute, "__name__", self.attribute)
        return f"{type(self.owner).__name__}[{key!r}]"

    def read(self) -> Any:
        """Returns the item; `ABSENT` if there is none."""
        try:
            return self.owner[self.attribute]
        except raised_here(KeyError, IndexError):
            return ABSENT

    def write(self, value: Any) -> None:
        """Stores ``value`` as the item; `ABSENT` deletes it."""
        if value is not ABSENT:
            self.owner[self.attribute] = value
        elif self.read() is not ABSENT:
            del self.owner[self.attribute]


def entries(owner: list[Any] | set[Any], *values: Any, is_foreign: bool = False) -> Patch:
    """Returns the patch that adds entries to a set, or to a list in front of the others."""
    ids = tuple(map(id, values))
    return _EntryPatch(owner, ids, values, stays_idle=True, is_foreign=is_foreign)


class _EntryPatch(Patch):
    __slots__ = ()

    def read(self) -> Any:
        return self.value if all(map(self.owner.__contains__, self.value)) else ABSENT

    def write(self, value: Any) -> None:
        if isinstance(self.owner, set):
            (self.owner.difference_update if value is ABSENT else self.owner.update)(self.value)
            return
        for entry in self.value:
            is_there = entry in self.owner
            if value is ABSENT and is_there:
                self.owner.remove(entry)
            elif value is not ABSENT and not is_there:
                self.owner.insert(0, entry)


class Applied(NamedTuple):
    """A patch in force, and the slot's value before it; `ABSENT` if it held none."""

    patch: Patch
    previous: Any


class SlotValues:
    """Values of many slots, compared and written in few steps: all names of a module at once."""

    def __init__(self, slots: Collection[tuple[Patch, Any]]) -> None:
        self.values = [value for _, value in slots]
        self._others: list[tuple[Patch, Any]] = []
        owners: dict[int, tuple[Any, dict[str, Any]]] = {}
        for patch, value in slots:
            owner, is_plain = patch.owner, type(patch) is Patch and not patch.is_foreign
            if is_plain and isinstance(owner, (type, types.ModuleType)):
                owners.setdefault(id(owner), (owner, {}))[1][patch.attribute] = value
            else:
                self._others.append((patch, value))
        self._reads: list[tuple[Callable[..., Any], Mapping[str, Any], Any]] = []
        self._updates: list[tuple[Callable[[dict[str, Any]], None], dict[str, Any]]] = []
        self._attributes: list[tuple[type, str, Any]] = []
        self._empty: list[tuple[Any, KeysView[str], list[str]]] = []
        for owner, named in owners.values():
            held: Any = owner.__dict__ if isinstance(owner, type) else names_of(owner)
            absent = [name for name, value in named.items() if value is ABSENT]
            filled = {name: value for name, value in named.items() if value is not ABSENT}
            if filled:
                read = operator.itemgetter(*filled)
                self._reads.append((read, held, read(filled)))
            if isinstance(held, dict):
                self._updates.append((held.update, filled))
            else:
                self._attributes += [(owner, name, value) for name, value in filled.items()]
            if absent:
                self._empty.append((owner, held.keys(), absent))

    def are_there(self) -> bool:
        """Whether all slots have these values."""
        try:
            return (
                all(read(held) == values for read, held, values in self._reads)
                and all(names.isdisjoint(absent) for _, names, absent in self._empty)
                and all(patch.read() is value for patch, value in self._others)
            )
        except KeyError:  # somebody else has emptied a slot
            return False

    def write(self) -> None:
        """Gives all slots these values."""
        for update, named in self._updates:
            update(named)
        for slot in self._attributes:
            setattr(*slot)
        for owner, names, absent in self._empty:
            for name in absent:
                if name in names:
                    delattr(owner, name)
        for patch, value in self._others:
            _write(patch, value)


def sides(applied: Iterable[Applied]) -> tuple[SlotValues, SlotValues]:
    """Returns the values of slots without these patches, and with them."""
    slots: dict[Hashable, tuple[Patch, Any, Any]] = {}
    for patch, before in applied:  # of two in one slot, the first has found what was there
        slots[patch.key] = patch, slots.get(patch.key, (patch, before))[1], patch.value
    without = [(patch, before) for patch, before, _ in slots.values()]
    return SlotValues(without), SlotValues([(patch, value) for patch, _, value in slots.values()])


class _Swap(Patch):
    __slots__ = ()

    def read(self) -> int:
        return 1 - int(self.value)

    def write(self, value: int) -> None:
        self.owner[value].write()


def swap(sides: tuple[SlotValues, SlotValues], side: int) -> Patch:
    """Returns the patch that gives slots the values on a side; they have those on the other."""
    return _Swap(sides, "", side)


class Draft:
    """The values of slots after changes that have not been made yet."""

    def __init__(self) -> None:
        self._values: dict[Hashable, tuple[Patch, Any]] = {}

    def read(self, patch: Patch) -> Any:
        """Returns the value that the slot of ``patch`` would hold; `ABSENT` for none."""
        drafted = self._values.get(patch.key)
        return patch.read() if drafted is None else drafted[1]

    def attribute(self, owner: Any, name: str) -> Any:
        """Returns ``getattr(owner, name)`` after the changes, for a module or a class."""
        is_class = isinstance(owner, type)
        for holder in owner.__mro__ if is_class else (owner,):
            drafted = self._values.get((id(holder), Patch, name))  # `Patch.key`
            value = _own(holder, name) if drafted is None else drafted[1]
            if value is ABSENT:
                continue
            get = getattr(type(value), "__get__", None)
            return value if get is None or not is_class else get(value, None, owner)
        fallback = getattr(type(owner), "__getattr__", None)  # called where a slot is empty
        if fallback is None:
            raise AttributeError(f"{owner!r} has no attribute {name!r}")
        return fallback(owner, name)

    def around(self, owner: Any, name: str, function: Callable[..., Any], **flags: bool) -> Patch:
        """Returns the patch that calls ``function`` with the slot's function, and each call's arguments."""
        original = self.attribute(owner, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        is_static = isinstance(owner, type) and isinstance(_own(owner, name), staticmethod)
        return Patch(owner, name, staticmethod(wrapper) if is_static else wrapper, **flags)

    def apply(self, patches: Iterable[Patch]) -> list[Applied]:
        """Drafts ``patches`` in order."""
        applied = []
        for patch in patches:
            applied.append(Applied(patch, self.read(patch)))
            self.put(patch)
        return applied

    def put(self, *patches: Patch, first: bool = False) -> None:
        """Drafts ``patches`` that are never undone; with ``first`` they are made before all others."""
        new = {patch.key: (patch, patch.value) for patch in patches}
        if first:
            self._values = new | self._values
        else:
            self._values.update(new)

    def undo(self, applied: Sequence[Applied]) -> list[Patch]:
        """Drafts that ``applied`` are undone, newest first, but for those that it returns.

        These are below somebody else's patches.
        """
        covered = []
        for done in reversed(applied):
            patch = done.patch
            if self.read(patch) is patch.value:
                self._values[patch.key] = patch, done.previous
            else:
                covered.append(patch)
        return covered

    def make(self, finish: Callable[[], None] | None = None) -> None:
        """Makes the drafted changes and calls ``finish``; if anything raises, nothing has changed.

        A slot goes from its old value to the new one in one step, so that a call in another thread
        finds one or the other.
        """
        written: list[tuple[Patch, Any]] = []
        try:
            for patch, value in self._values.values():
                before = patch.read()
                if before is not value:
                    written.append((patch, before))
                    _write(patch, value)
            if finish is not None:
                finish()
        except BaseException:
            for patch, before in reversed(written):
                _write(patch, before)
            raise


def _write(patch: Patch, value: Any) -> None:
    try:
        patch.write(value)
    except raised_here(Exception):  # a user's module may reject the value
        if not patch.is_foreign:
            raise


def apply(patches: Iterable[Patch]) -> list[Applied]:
    """Applies all ``patches`` in order, or none of them."""
    draft = Draft()
    applied = draft.apply(patches)
    draft.make()
    return applied


def undo(applied: Sequence[Applied]) -> list[Patch]:
    """Undoes all of ``applied``, or nothing; returns the patches that `Draft.undo` leaves."""
    draft = Draft()
    covered = draft.undo(applied)
    draft.make()
    return covered
