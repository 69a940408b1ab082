"""Replaces attributes and puts them back exactly as they were.

Undo is the hard half: a slot that a patch created is deleted, one that it overwrote gets its old
value, and one that somebody else has patched since is left to them. Knows no dtypes and no policy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_ABSENT: Any = object()


@dataclass(frozen=True, slots=True)
class Patch:
    """A value to put at ``owner.attribute``: ``owner`` is a module, a class or an instance.

    ``stays_idle`` says that the value does nothing once its patch was to be undone, so that it may
    stay beneath somebody else's patch and nobody needs to hear of it.
    """

    owner: Any
    attribute: str
    value: Any
    stays_idle: bool = False


@dataclass(frozen=True, slots=True)
class ItemPatch:
    """A value to put at ``owner[attribute]``, an item of a dict or a list."""

    owner: Any
    attribute: Any
    value: Any


@dataclass(frozen=True, slots=True)
class Applied:
    """A patch in force, and what its slot held before; `_ABSENT` if nothing."""

    patch: Patch | ItemPatch
    previous: Any


def apply(patches: Iterable[Patch | ItemPatch]) -> list[Applied]:
    """Applies all ``patches`` in order, or none of them: an error undoes what was done."""
    applied: list[Applied] = []
    try:
        for patch in patches:
            previous = _value(patch)
            if isinstance(patch, ItemPatch):
                patch.owner[patch.attribute] = patch.value
            else:
                setattr(patch.owner, patch.attribute, patch.value)
            applied.append(Applied(patch, previous))
    except BaseException:
        undo(applied)
        raise
    return applied


def undo(applied: Iterable[Applied]) -> list[Patch | ItemPatch]:
    """Undoes ``applied``, newest first.

    Returns:
        The patches on top of which somebody else has patched; their slots are left as they are.
    """
    covered = []
    for done in reversed(list(applied)):
        patch = done.patch
        if _value(patch) is not patch.value:
            covered.append(patch)
        elif isinstance(patch, ItemPatch):
            if done.previous is _ABSENT:
                del patch.owner[patch.attribute]
            else:
                patch.owner[patch.attribute] = done.previous
        elif done.previous is _ABSENT:
            delattr(patch.owner, patch.attribute)
        else:
            setattr(patch.owner, patch.attribute, done.previous)
    return covered


def _value(patch: Patch | ItemPatch) -> Any:
    """Returns what the slot of ``patch`` holds, itself and not by inheritance; `_ABSENT` if none."""
    if isinstance(patch, Patch):
        return vars(patch.owner).get(patch.attribute, _ABSENT)
    try:
        return patch.owner[patch.attribute]
    except (KeyError, IndexError):
        return _ABSENT
