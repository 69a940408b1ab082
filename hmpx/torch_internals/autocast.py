"""The private side of torch.autocast: its state, its regions and its decorators."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Final

import torch

from .torch_part import one, rely_on


def _tells_autocast(is_any_enabled: Callable[[], bool], disable: Any) -> bool:
    before = is_any_enabled()
    was_enabled = torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", True)
    try:
        inside = is_any_enabled()
        with disable():
            x = one()[:, None]
            dtype = torch.mm(x, x).dtype
    finally:
        torch.set_autocast_enabled("cpu", was_enabled)
    return isinstance(before, bool) and inside is True and dtype is torch.float32


#: Whether torch.autocast is on for any device type here; and a context in which it casts nothing.
is_any_autocast_enabled, DisableAutocast = rely_on(
    "torch._C._is_any_autocast_enabled",
    "torch._C._DisableAutocast",
    feature="calls inside of torch.autocast",
    without="what is cast there would be unknown",
    behaves=_tells_autocast,
)


#: Modules of torch that open regions on behalf of the user's code.
AUTOCAST_OPENERS: Final = (
    "torch.amp.autocast_mode",  # decorators, and graphs
    "torch._higher_order_ops.wrap",
    "torch._dynamo.variables.higher_order_ops",
)

_NESTING: Final = torch.autocast_increment_nesting, torch.autocast_decrement_nesting


def autocast_depth() -> int:
    """Returns how many regions of torch.autocast are open in this thread.

    torch can only increment and decrement; `map` does both in C, so no signal comes between.
    """
    _, depth = map(type(_NESTING[0]).__call__, _NESTING)
    return int(depth)


#: Device types that torch knows but that don't exist. torch.compile guards on their autocast states, and
#: backward threads inherit these, so they can carry states of hmpx.
OFF_MARK, TRAINING_MARK = "maia", "ipu"
rely_on(
    "torch.set_autocast_enabled",
    "torch.is_autocast_enabled",
    feature="disable_casts in graphs and backward threads",
    without="casts that are off would be on there",
    behaves=lambda _, is_enabled: is_enabled(OFF_MARK) is is_enabled(TRAINING_MARK) is False,
)

enter_autocast, exit_autocast = rely_on(
    "torch.amp.autocast_mode._enter_autocast",
    "torch.amp.autocast_mode._exit_autocast",
    feature="regions of torch.autocast in exported graphs",
    without="exported graphs cast inside of regions that are off",
    instead=(None, None),
)


def _code_in(function: Any, name: str) -> types.CodeType | None:
    """Returns the code of the function ``name`` that is defined inside ``function``."""
    codes = [c for c in function.__code__.co_consts if isinstance(c, types.CodeType)]
    return next((code for code in codes if code.co_name == name), None)


_custom_fwd, _custom_bwd = rely_on(
    "torch.amp.autocast_mode.custom_fwd",
    "torch.amp.autocast_mode.custom_bwd",
    feature="torch.amp.custom_fwd",
    without="functions that it decorates run with casts on, whatever their cast_inputs say",
    behaves=lambda forward, backward: (
        _code_in(forward, "decorate_fwd") is not None
        and _code_in(backward, "decorate_bwd") is not None
    ),
    instead=(lambda: None, lambda: None),
)
#: Code of all functions decorated by these. Libraries decorate them before a conversion.
CUSTOM_FORWARD: Final = _code_in(_custom_fwd, "decorate_fwd")
CUSTOM_BACKWARD: Final = _code_in(_custom_bwd, "decorate_bwd")
