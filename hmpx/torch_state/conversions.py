"""The conversion in force, reduced to what regions and caches compare."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

from ..patching import Patch


class Epoch:
    """The time of a conversion from `convert` to `revert`, which regions belong to.

    Attributes:
        ended_by: The thread that reverts the conversion; its regions end with it, even those that
            were lost. Regions of other threads are left to those threads.
    """

    __slots__ = ("ended_by",)

    def __init__(self) -> None:
        """Begins in any thread."""
        self.ended_by: int | None = None


#: The conversion in force; None while there is none.
epoch: Epoch | None = None

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
        new_epoch: The result of `begin_conversion`; None for no conversion.
        now_decides: A value that identifies what the results of calls depend on.
        device_types: The device types whose tensors are cast.
    """
    this = sys.modules[__name__]
    yield Patch(this, "epoch", new_epoch)
    yield Patch(this, "decides", now_decides)
    yield Patch(this, "covered", device_types)


def begin_to_end() -> None:
    """Notes that this thread is reverting the conversion in force, which may still fail."""
    if epoch is not None:
        epoch.ended_by = threading.get_ident()
