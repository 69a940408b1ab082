"""The conversion in force, as far as the state of calls is concerned: what regions and caches compare."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

from ..patching import Patch


class Epoch:
    """A conversion from `convert` to `revert`, as far as regions are concerned.

    Attributes:
        ended_by: The thread that reverts it, whose regions end with it, however they were lost. Those of
            other threads are theirs to leave.
    """

    __slots__ = ("ended_by",)

    def __init__(self) -> None:
        """Begins in any thread."""
        self.ended_by: int | None = None


#: The conversion in force; None while there is none.
epoch: Epoch | None = None

#: What the conversion in force makes of calls, to be compared with what another one does; None while
#: there is none.
decides: object | None = None

#: The device types whose tensors the conversion in force casts.
covered: frozenset[str] = frozenset()


def is_covered(device_type: str) -> bool:
    """Whether the conversion in force casts tensors on devices of this type."""
    return device_type in covered


def in_force() -> object | None:
    """Returns what stands for the conversion in force; None while there is none."""
    return epoch


def conversion() -> tuple[object, object] | None:
    """Returns what is equal as long as calls compute the same; None while there is no conversion.

    One that replaces another need not do so, nor the same one when its rules have changed.
    """
    return None if epoch is None else (epoch, decides)


def conversion_patches(
    new_epoch: object | None, now_decides: object | None, device_types: frozenset[str]
) -> Iterator[Patch]:
    """Yields the patches of this module that put a conversion in force.

    Args:
        new_epoch: What `begin_conversion` has returned; None for no conversion.
        now_decides: What the results of calls depend on.
        device_types: The device types whose tensors are cast.
    """
    this = sys.modules[__name__]
    yield Patch(this, "epoch", new_epoch)
    yield Patch(this, "decides", now_decides)
    yield Patch(this, "covered", device_types)


def begin_to_end() -> None:
    """Notes that this thread reverts the conversion in force: it may still fail to."""
    if epoch is not None:
        epoch.ended_by = threading.get_ident()
