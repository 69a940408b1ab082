"""The conversion in force, reduced to what regions and caches compare."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from ..patching import Patch

#: Identifies the time of the conversion in force, from `convert` to `revert`; None while there is none.
epoch: object | None = None

#: Identifies how the conversion in force treats calls, for comparison with another conversion; None
#: while there is none.
decides: object | None = None

#: The device types whose tensors the conversion in force casts.
covered: frozenset[str] = frozenset()


def is_covered(device_type: str) -> bool:
    """Whether the conversion in force casts tensors on devices of this type."""
    return device_type in covered


def in_force() -> object | None:
    """Returns an object that identifies the conversion in force; None while there is none."""
    return epoch


def decided() -> object | None:
    """Returns the object that identifies how the conversion in force treats calls."""
    return decides


def conversion() -> tuple[object, object] | None:
    """Returns a value that stays equal while calls compute the same; None without a conversion.

    A conversion that replaces another may compute differently, as may the same one with new rules.
    """
    return None if epoch is None else (epoch, decides)


def conversion_patches(
    new_epoch: object | None, now_decides: object | None, device_types: frozenset[str]
) -> Iterator[Patch]:
    """Yields the patches of this module that put a conversion in force.

    Args:
        new_epoch: Identifies the time of the conversion; None for no conversion.
        now_decides: A value that identifies what the results of calls depend on.
        device_types: The device types whose tensors are cast.
    """
    this = sys.modules[__name__]
    yield Patch(this, "epoch", new_epoch)
    yield Patch(this, "decides", now_decides)
    yield Patch(this, "covered", device_types)
