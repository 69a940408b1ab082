"""Replaces attributes, and restores them exactly, all of them or none.

Changes are drafted first: a `Draft` holds the new values of slots while torch stays unchanged. `Draft.make`
then writes them, and undoes everything if anything raises meanwhile. Undo deletes slots that a patch
created, and restores the old values of others. It leaves slots alone that somebody else has patched since.
"""

from __future__ import annotations

import itertools
import operator
import types
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

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
    return tuple([_below(function) for function in functions])


def _below(function: Any) -> Any:
    while (
        type(function) is types.FunctionType
        and "__wrapped__" in vars(function)
        and function.__globals__["__name__"].startswith(_OWN)
    ):
        function = vars(function)["__wrapped__"]
    return function


class Change(Protocol):
    """A slot, and the value to put there."""

    @property
    def value(self) -> Any:
        """The value to put there."""

    @property
    def is_foreign(self) -> bool:
        """Whether the slot is the user's: it may reject the value, and may change at any time."""

    @property
    def stays_idle(self) -> bool:
        """Whether the value may stay below somebody else's patch, since it no longer does anything."""

    @property
    def key(self) -> Hashable:
        """Identifies the slot."""

    @property
    def where(self) -> str:
        """The slot's name, for messages."""

    def read(self) -> Any:
        """Returns the slot's value; `ABSENT` if it holds none."""

    def write(self, value: Any) -> None:
        """Stores ``value`` in the slot; `ABSENT` empties it."""


@dataclass(frozen=True, slots=True)
class Patch:
    """A value to put at ``owner.attribute``, for a module, a class, an instance or a closure's cell."""

    owner: Any
    attribute: str
    value: Any
    stays_idle: bool = False
    is_foreign: bool = False

    @property
    def key(self) -> Hashable:
        """Identifies the slot."""
        return id(self.owner), "attribute", self.attribute

    @property
    def where(self) -> str:
        """The slot's name, for messages."""
        owner = self.owner
        name = owner.__name__ if isinstance(owner, types.ModuleType) else _class_name(owner)
        return f"{name}.{self.attribute}"

    def read(self) -> Any:
        """Returns the slot's own value, which is not inherited; `ABSENT` if it holds none."""
        return _own(self.owner, self.attribute)

    def write(self, value: Any) -> None:
        """Makes the slot hold ``value``; `ABSENT` deletes it."""
        if value is not ABSENT:
            setattr(self.owner, self.attribute, value)
        elif self.read() is not ABSENT:
            delattr(self.owner, self.attribute)


def _own(owner: Any, attribute: str) -> Any:
    """Returns the value of an attribute that is not inherited; `ABSENT` if there is none."""
    if isinstance(owner, type):
        return owner.__dict__.get(attribute, ABSENT)
    if issubclass(type(owner), types.ModuleType):
        return _NAMES.__get__(owner).get(attribute, ABSENT)
    own = getattr(owner, "__dict__", None)
    if own is None or type(owner) is types.FunctionType:
        return getattr(owner, attribute, ABSENT)
    return own.get(attribute, ABSENT)


@dataclass(frozen=True, slots=True)
class ItemPatch:
    """A value to put at ``owner[attribute]``, an item of a dict or a list."""

    owner: Any
    attribute: Any
    value: Any
    stays_idle: bool = False
    is_foreign: bool = False

    @property
    def key(self) -> Hashable:
        """Identifies the slot."""
        return id(self.owner), "item", self.attribute

    @property
    def where(self) -> str:
        """The slot's name, for messages."""
        return (
            f"{type(self.owner).__name__}[{getattr(self.attribute, '__name__', self.attribute)!r}]"
        )

    def read(self) -> Any:
        """Returns the slot's value; `ABSENT` if it holds none."""
        try:
            return self.owner[self.attribute]
        except (KeyError, IndexError):
            return ABSENT

    def write(self, value: Any) -> None:
        """Makes the slot hold ``value``; `ABSENT` deletes it."""
        if value is not ABSENT:
            self.owner[self.attribute] = value
        elif self.read() is not ABSENT:
            del self.owner[self.attribute]


@dataclass(frozen=True, slots=True)
class EntryPatch:
    """A value to add to a set, or to a list in front of the other entries."""

    owner: list[Any] | set[Any]
    value: Any
    stays_idle: bool = True
    is_foreign: bool = False

    @property
    def key(self) -> Hashable:
        """Identifies the slot."""
        return id(self.owner), "entry", id(self.value)

    @property
    def where(self) -> str:
        """The slot's name, for messages."""
        return f"entry {self.value!r}"

    def read(self) -> Any:
        """Returns the value if it is an entry, else `ABSENT`."""
        if isinstance(self.owner, set):
            return self.value if self.value in self.owner else ABSENT
        return self.value if any(entry is self.value for entry in self.owner) else ABSENT

    def write(self, value: Any) -> None:
        """Makes the value an entry; with `ABSENT`, removes it."""
        is_there = self.read() is not ABSENT
        if value is ABSENT and is_there:
            self.owner.remove(self.value)
        elif value is not ABSENT and not is_there:
            if isinstance(self.owner, set):
                self.owner.add(self.value)
            else:
                self.owner.insert(0, self.value)


@dataclass(frozen=True, slots=True)
class Applied:
    """A patch in force, and the slot's value before it; `ABSENT` if it held none."""

    patch: Change
    previous: Any


@dataclass(frozen=True, slots=True, eq=False)
class Swap:
    """Patches that were applied, to be undone and applied again many times, quickly.

    Attributes:
        applied: The patches, in the order applied.
        value: Whether they are to be in force.
    """

    applied: Sequence[Applied]
    value: bool = True
    is_foreign = False
    stays_idle = False
    where = "patches"
    #: Slots of modules and classes: the owner, and its values without and with the patches. Other slots.
    _groups: list[tuple[Any, tuple[dict[str, Any], dict[str, Any]]]] = field(default_factory=list)
    _others: list[tuple[Change, tuple[Any, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Sorts the slots by owner."""
        if self._groups or self._others:
            return
        slots: dict[Hashable, tuple[Change, Any]] = {}
        for done in self.applied:
            _, before = slots.get(done.patch.key, (None, done.previous))
            slots[done.patch.key] = done.patch, before
        groups: dict[int, tuple[Any, tuple[dict[str, Any], dict[str, Any]]]] = {}
        for patch, before in slots.values():
            owner = None if patch.is_foreign else getattr(patch, "owner", None)
            if isinstance(patch, Patch) and isinstance(owner, (type, types.ModuleType)):
                _, sides = groups.setdefault(id(owner), (owner, ({}, {})))
                sides[0][patch.attribute], sides[1][patch.attribute] = before, patch.value
            else:
                self._others.append((patch, (before, patch.value)))
        self._groups.extend(groups.values())

    @property
    def key(self) -> Hashable:
        """Identifies the patches."""
        return id(self._groups)

    def read(self) -> bool | None:
        """Returns whether the patches are in force; None if some are not."""
        for value in (False, True):
            if all(_holds(owner, sides[value]) for owner, sides in self._groups) and all(
                patch.read() is sides[value] for patch, sides in self._others
            ):
                return value
        return None

    def write(self, value: bool) -> None:
        """Applies the patches, or undoes them."""
        for owner, sides in self._groups:
            new, held = sides[value], _held(owner)
            if isinstance(held, dict) and ABSENT not in new.values():
                held.update(new)
                continue
            for name, each in new.items():
                if each is not ABSENT:
                    setattr(owner, name, each)
                elif name in held:
                    delattr(owner, name)
        for patch, both in self._others:
            _write(patch, both[value])


def _held(owner: Any) -> Mapping[str, Any]:
    return owner.__dict__ if isinstance(owner, type) else names_of(owner)


def _holds(owner: Any, values: Mapping[str, Any]) -> bool:
    held = map(_held(owner).get, values, itertools.repeat(ABSENT))
    return all(map(operator.is_, held, values.values()))


class Draft:
    """The values of slots after changes that have not been made yet."""

    def __init__(self) -> None:
        """Starts without changes."""
        self._values: dict[Hashable, tuple[Change, Any]] = {}

    def read(self, patch: Change) -> Any:
        """Returns the value that the slot of ``patch`` would hold; `ABSENT` for none."""
        drafted = self._values.get(patch.key)
        return patch.read() if drafted is None else drafted[1]

    def attribute(self, owner: Any, name: str) -> Any:
        """Returns ``getattr(owner, name)`` after the changes, for a module or a class."""
        is_class = isinstance(owner, type)
        for holder in owner.__mro__ if is_class else (owner,):
            drafted = self._values.get((id(holder), "attribute", name))  # `Patch.key`
            value = _own(holder, name) if drafted is None else drafted[1]
            if value is ABSENT:
                continue
            get = getattr(type(value), "__get__", None)
            return value if get is None or not is_class else get(value, None, owner)
        fallback = getattr(type(owner), "__getattr__", None)  # called where a slot is empty
        if fallback is None:
            raise AttributeError(f"{owner!r} has no attribute {name!r}")
        return fallback(owner, name)

    def apply(self, patches: Iterable[Change]) -> list[Applied]:
        """Drafts ``patches`` in order."""
        applied, values = [], self._values
        for patch in patches:
            key = patch.key
            drafted = values.get(key)
            applied.append(Applied(patch, patch.read() if drafted is None else drafted[1]))
            values[key] = patch, patch.value
        return applied

    def begin_with(self, patches: Iterable[Change]) -> None:
        """Drafts ``patches`` to be made before all others."""
        first = Draft()
        first.apply(patches)
        self._values = first._values | self._values

    def undo(self, applied: Sequence[Applied]) -> list[Change]:
        """Drafts that ``applied`` are undone, newest first.

        Returns:
            The patches below somebody else's patches; their slots stay unchanged.
        """
        covered, values = [], self._values
        for done in reversed(applied):
            patch = done.patch
            key = patch.key
            drafted = values.get(key)
            if (patch.read() if drafted is None else drafted[1]) is patch.value:
                values[key] = patch, done.previous
            else:
                covered.append(patch)
        return covered

    def make(self, finish: Callable[[], None] | None = None) -> None:
        """Makes the drafted changes and calls ``finish``; if anything raises, nothing has changed.

        A slot goes from its old value to the new one in one step, so that a call in another thread
        finds one or the other.
        """
        written: list[tuple[Change, Any]] = []
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


def _write(patch: Change, value: Any) -> None:
    try:
        patch.write(value)
    except Exception:  # a user's module may reject the value
        if not patch.is_foreign:
            raise


def apply(patches: Iterable[Change]) -> list[Applied]:
    """Applies all ``patches`` in order, or none of them."""
    draft = Draft()
    applied = draft.apply(patches)
    draft.make()
    return applied


def undo(applied: Sequence[Applied]) -> list[Change]:
    """Undoes all of ``applied``, newest first, or nothing.

    Returns:
        The patches below somebody else's patches; their slots stay unchanged.
    """
    draft = Draft()
    covered = draft.undo(applied)
    draft.make()
    return covered


def _class_name(owner: Any) -> str:
    cls = owner if isinstance(owner, type) else type(owner)
    return f"{cls.__module__}.{cls.__qualname__}"
