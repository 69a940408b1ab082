"""Identifies the current conversion, for regions and caches, and calls below the dispatcher."""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Iterator

from torch import nn

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

#: Identifies the current conversion, from `convert` to `revert`; None without a conversion.
epoch: object | None = None

#: Identifies how the current conversion treats calls, to compare conversions; None without a
#: conversion.
decides: object | None = None

#: The device types whose tensors the current conversion casts.
covered: frozenset[str] = frozenset()

#: The module inside of which it casts; None for everywhere.
within: weakref.ref[nn.Module] | None = None


def is_covered(device_type: str) -> bool:
    """Whether the current conversion casts tensors on devices of this type."""
    return device_type in covered


def casts_any() -> bool:
    """Whether the current conversion casts tensors at all, rather than only letting observers see calls."""
    return bool(covered)


def in_force() -> object | None:
    """Returns an object that identifies the current conversion; None without one."""
    return epoch


def decided() -> object | None:
    """Returns the object that identifies how the current conversion treats calls."""
    return decides


def conversion() -> tuple[object, object] | None:
    """Returns a value that is equal as long as calls compute the same; None without a conversion.

    A conversion that replaces another may compute differently, as may the same one with new rules.
    """
    return None if epoch is None else (epoch, decides)


def conversion_patches(
    new_epoch: object | None,
    now_decides: object | None,
    device_types: frozenset[str],
    module: weakref.ref[nn.Module] | None,
) -> Iterator[Patch]:
    """Yields the patches of this module that put a conversion in force."""
    this = sys.modules[__name__]
    yield Patch(this, "epoch", new_epoch)
    yield Patch(this, "decides", now_decides)
    yield Patch(this, "covered", device_types)
    yield Patch(this, "within", module)


# Below the dispatcher (in a decomposition, a meta function, a kernel written in Python) dtypes are
# final. This private test is exact, and has existed since torch 2.0.
# Exceptions are decompositions that replace composite kernels while AOTAutograd and torch.export
# trace: their state equals that of the user's own calls. Only their module distinguishes them.
_BETWEEN = (PACKAGE, *FUNCTION_MODULES)


def is_below_dispatcher() -> bool:
    """Whether the call comes from torch itself, below the dispatcher, where nothing is cast."""
    return is_excluded(SNAPSHOT) or (is_included(PYTHON) and _is_called_by_kernel())


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
