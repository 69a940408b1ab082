"""The current conversion, and the off switch: which casts are off, per thread and task.

`disable_casts` switches off all casts; a region of torch.autocast, those of its device type.
"""

from __future__ import annotations

import contextvars
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Final

import torch
from torch import nn

from ..patching import Patch
from ..places import PACKAGE
from ..tensors import DEVICE_TYPES
from ..torch_internals import (
    FUNCTION_MODULES,
    KERNEL_MODULES,
    OFF_MARK,
    PYTHON,
    SNAPSHOT,
    TRAINING_MARK,
    current_graph_task,
    is_any_autocast_enabled,
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


#: In a set of device types whose casts are off: stands for all of them.
EVERY: Final = "*"
#: In such a set: stands for casts to low precision.
TO_LOW: Final = "to low precision"
#: No casts are off.
ON: Final[frozenset[str]] = frozenset()

# The state is also marked in the autocast bits of device types that don't exist. torch.compile guards on
# these bits and captures them, and autograd's backward threads inherit them. Neither is true of
# thread-locals and context variables.
#: Entry of such a set -> the device type whose bit marks it. It only grows: marks keep their meaning.
_marks: dict[str, str] = {EVERY: OFF_MARK}
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
    for name, bit in list(_marks.items()):
        set_enabled(bit, name in off)


def marked() -> frozenset[str]:
    return frozenset([name for name, bit in list(_marks.items()) if is_enabled(bit)])


def is_autocast_on() -> bool:
    """Whether torch.autocast is on in this thread, for any device type whose bit is not a mark."""
    if not is_any_autocast_enabled():
        return False
    marks = {*_marks.values(), TRAINING_MARK}
    return any(is_enabled(each.name) for each in DEVICE_TYPES if each.name not in marks)


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


# --- regions -------------------------------------------------------------------------------------

#: Where casts may be off, or torch.autocast on; calls check that only while there is any: open regions of all
#: threads, threads in which torch.autocast is on by their identifiers, and `IN_GRAPHS`. In the order of opening.
open_regions: Final[dict[Region | int | str, None]] = {}
#: torch.compile has put a region into a graph, which may run at any time.
IN_GRAPHS: Final = "in graphs"


class Region:
    """A block in which casts are off, or on again.

    Attributes:
        off: The device types whose casts are off in it; all types if it contains `EVERY`.
        opener: The object that opens and closes it, or a weak reference to it.
        kind: The class of that object.
        outer: The enclosing region.
        beneath: The casts that were off outside the outermost region, by marks that no region of this
            thread has set.
        thread: The thread that opened it.
        is_closed: It was left, perhaps in another thread or task.
    """

    off: frozenset[str]
    beneath: frozenset[str]

    __slots__ = ("beneath", "is_closed", "kind", "off", "opener", "outer", "thread")

    def __init__(
        self,
        opener: object,
        *,
        off: frozenset[str] | None = None,
        more: frozenset[str] = ON,
        less: frozenset[str] = ON,
    ) -> None:
        """Creates the region; `open_region` opens it."""
        self.opener, self.is_closed = opener, False
        self.kind = type(opener() if type(opener) is weakref.ref else opener)
        self.outer = outer = innermost()
        self.beneath = _inherited() if outer is None else outer.beneath
        if off is None:
            off = ((self.beneath if outer is None else outer.off) | more) - less
        self.off, self.thread = off, threading.get_ident()

    def is_over(self) -> bool:
        """Whether it was left or its opener is gone."""
        opener = self.opener
        return self.is_closed or (type(opener) is weakref.ref and opener() is None)

    def is_opened_by(self, opener: object) -> bool:
        own = self.opener
        return opener is (own() if type(own) is weakref.ref else own)


#: The innermost region of this thread, or asyncio task.
_region: contextvars.ContextVar[Region | None] = contextvars.ContextVar("hmpx_region", default=None)


def innermost() -> Region | None:
    """Returns the innermost open region, and drops those that are over."""
    found = _region.get()
    if found is not None and found.is_over():
        _settle_on(found)
        return _region.get()
    return found


def open_region(region: Region) -> None:
    """Opens ``region`` in this thread or task.

    A region with a weak reference to its opener ends with this, if a signal arrives before its block has begun.
    """
    try:
        _region.set(region)  # first: if closing is also interrupted, the next check drops it
        open_regions[region] = None
        mark(region.off)
    except BaseException:
        close_region(region)
        raise


def close_region(region: Region | None) -> None:
    """Closes ``region`` and lost regions inside it; closing twice does nothing.

    Other threads and tasks in which it is open notice at their next check.
    """
    if region is None:
        return
    region.is_closed = True
    inner = _region.get()
    while inner is not None and inner is not region:
        inner = inner.outer
    if inner is not None:
        _settle_on(region.outer)
    else:
        _forget(region)
        _settle_on(_region.get())


def _settle_on(region: Region | None) -> None:
    """Makes ``region`` the innermost region of this thread or task."""
    inner = left = _region.get()
    while region is not None and region.is_over():
        region = region.outer
    if region is not None:
        mark(region.off)
    else:
        is_own = inner is not None and inner.thread == threading.get_ident()
        mark(inner.beneath if inner is not None and is_own else ON)
    while left is not None and left is not region:
        _forget(left)
        left = left.outer
    _region.set(region)  # last: if this call is interrupted, the next one repeats it


def _forget(region: Region) -> None:
    # In a copy of another thread's context, that thread handles it.
    if region.thread == threading.get_ident():
        open_regions.pop(region, None)


def is_off() -> bool:
    if torch.compiler.is_dynamo_compiling():
        return _is_off_where_traced()
    return _covers_all(off())


def partly_off() -> frozenset[str]:
    """Returns the device types whose casts are off while others are on, and `TO_LOW` if those are off."""
    found = off()
    return ON if not found or _covers_all(found) else found & (covered | {TO_LOW})


def has_casts(device_type: str) -> bool:
    return device_type in covered and not {EVERY, device_type} & off()


def off() -> frozenset[str]:
    region = innermost()
    if region is None:
        return _inherited()
    is_in_graph = IN_GRAPHS in open_regions and is_enabled(OFF_MARK) and EVERY not in region.off
    return region.off | ALL if is_in_graph and not _is_off_in_others() else region.off


ALL: Final = frozenset([EVERY])


def _covers_all(off: frozenset[str]) -> bool:
    return EVERY in off or (bool(off) and covered <= off)


def _is_off_where_traced() -> bool:
    """Whether all casts are off where torch.compile traces; it guards on marks."""
    return _covers_all(marked() if open_regions or _may_inherit() else ON)


def _inherited() -> frozenset[str]:
    """Returns the casts that are off outside all regions of this thread or task.

    A mark that no code of this thread has set comes from a compiled graph, or a backward thread has
    inherited it. Any other mark belongs to another asyncio task, or to a region that was left inside
    `torch.inference_mode`, which restores marks at its end.
    """
    found = marked()
    if found and not _opened_here():
        if _may_inherit():
            return found
        mark(ON)
    return ON


def _may_inherit() -> bool:
    """Whether a compiled graph or autograd may have set marks for this thread."""
    return IN_GRAPHS in open_regions or current_graph_task() != -1


def _opened_here() -> list[Region]:
    thread = threading.get_ident()
    return [r for r in list(open_regions) if isinstance(r, Region) and r.thread == thread]


def _is_off_in_others() -> bool:
    """Whether casts are off in a region that another task of this thread has opened."""
    own, region = set(), _region.get()
    while region is not None:
        own.add(region)
        region = region.outer
    return any(EVERY in each.off for each in _opened_here() if each not in own)


def last_region(opener: object) -> Region | None:
    """Returns the last region that ``opener`` opened, here or in another thread or task."""
    region = _region.get()
    while region is not None and not region.is_opened_by(opener):
        region = region.outer
    if region is not None:
        return region
    opened = [r for r in list(open_regions) if isinstance(r, Region) and r.is_opened_by(opener)]
    return next((r for r in reversed(opened) if not r.is_over()), None)


def note_autocast() -> None:
    """Has calls look closer as long as torch.autocast is on in this thread."""
    open_regions[threading.get_ident()] = None


def settle_autocast() -> None:
    """Ends that if torch.autocast is off in this thread."""
    if not is_autocast_on():
        open_regions.pop(threading.get_ident(), None)


def end_conversion() -> None:
    """Forgets torch.autocast's regions after the last conversion, as their ``__exit__`` is torch's again.

    Those in which casts are off last as long as their autocast objects.
    """
    for region in list(open_regions):
        if isinstance(region, int):
            open_regions.pop(region, None)
        elif isinstance(region, Region) and isinstance(region.opener, torch.autocast):
            region.opener = weakref.ref(region.opener)


def note_traced_region() -> None:
    """Records that torch.compile has put a region into a graph, which may run at any time."""
    open_regions[IN_GRAPHS] = None


for _function in (note_traced_region, _is_off_where_traced):
    run_when_traced(_function)
