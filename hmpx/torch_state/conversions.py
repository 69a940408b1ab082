"""The conversion in force as regions and caches compare it, and calls below the dispatcher."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

from ..patching import Patch
from ..places import PACKAGE
from ..torch_internals import (
    FUNCTION_MODULES,
    KERNEL_MODULES,
    PYTHON,
    SNAPSHOT,
    is_excluded,
    is_included,
    run_when_traced,
)

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


# Below the dispatcher (in a decomposition, a meta function, a kernel written in Python) the call's
# dtypes were settled above it. This private test is exact, and has existed since torch 2.0.
_is_excluded, _SNAPSHOT = is_excluded, SNAPSHOT
# The exception are decompositions that stand in for composite kernels while AOTAutograd and
# torch.export trace: their state is that of the user's own calls. Only their module tells them apart.
_is_included, _PYTHON = is_included, PYTHON
_BETWEEN = (PACKAGE, *FUNCTION_MODULES)


def is_below_dispatcher() -> bool:
    """Whether the call comes from torch itself, where nothing is cast."""
    return _is_excluded(_SNAPSHOT) or (_is_included(_PYTHON) and _is_called_by_kernel())


def _is_called_by_kernel() -> bool:
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.startswith(KERNEL_MODULES):
            return True
        if not module.startswith(_BETWEEN):
            return False
        frame = frame.f_back
    return False


run_when_traced(is_below_dispatcher)
