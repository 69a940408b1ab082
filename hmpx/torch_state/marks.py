"""Marks which casts are off in state that torch itself propagates: autocast bits of absent device types."""

from __future__ import annotations

from typing import Final

import torch

from ..device_types import DEVICE_TYPES
from ..torch_internals import OFF_MARK

#: In a set of device types whose casts are off: stands for all of them.
EVERY: Final = "*"
#: In such a set: stands for casts to low precision.
TO_LOW: Final = "to low precision"
#: No casts are off.
ON: Final[frozenset[str]] = frozenset()

# The state is also marked in the autocast bits of device types that don't exist. torch.compile guards on
# these bits and captures them, and autograd's backward threads inherit them. Neither is true of
# thread-locals and context variables.
_MARK = OFF_MARK
#: Entry of such a set -> the device type whose bit marks it. It only grows: marks keep their meaning.
_marks: dict[str, str] = {EVERY: _MARK}
#: In the order of use.
_SPARE: Final = tuple(
    [
        each.name
        for each in sorted(DEVICE_TYPES, key=lambda each: each.spare or 0)
        if each.spare is not None
    ]
)

# Read now: a conversion replaces the first by a function that reflects casts.
is_enabled, set_enabled = torch.is_autocast_enabled, torch.set_autocast_enabled
AUTOCAST_STATE: Final = (torch.is_autocast_enabled, torch.get_autocast_dtype)


def mark(off: frozenset[str]) -> None:
    """Marks exactly what is off."""
    for name, bit in list(_marks.items()):
        set_enabled(bit, name in off)


def marked() -> frozenset[str]:
    """Returns the marked set."""
    return frozenset([name for name, bit in list(_marks.items()) if is_enabled(bit)])


def mark_every(is_off: bool) -> None:
    """Marks whether all casts are off."""
    set_enabled(_MARK, is_off)


def is_every_marked() -> bool:
    """Whether all casts are marked as off."""
    return is_enabled(_MARK)


def reserve_marks(device_types: frozenset[str]) -> None:
    """Reserves a bit as a mark for each of ``device_types``, starting with those that are present.

    As long as bits are left: autocast knows more device types than a machine has.
    """
    if device_types <= _marks.keys():
        return
    accelerator = torch.accelerator.current_accelerator()
    here = {"cpu", "" if accelerator is None else accelerator.type}
    free = [
        bit
        for bit in _SPARE
        if bit not in here and bit not in device_types and bit not in _marks.values()
    ]
    for name in sorted(device_types - _marks.keys(), key=lambda name: (name not in here, name)):
        if free:
            _marks[name] = free.pop(0)
