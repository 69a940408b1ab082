"""What regions of torch.autocast say to a conversion.

A region with ``enabled=False`` means fp32 here, to everybody who writes one: it switches the casts of
its device type off; an enabled one inside of it switches them on again. Knows neither ops nor policies.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch.amp.autocast_mode

from .patching import Draft, Patch
from .switch import (
    ON,
    Region,
    close_region,
    count_autocast,
    has_casts,
    is_covered,
    last_region,
    off,
    open_region,
    run_when_traced,
)


def patches(draft: Draft) -> Iterator[Patch]:
    """Yields the patches of torch.autocast, and of what asks whether it is on."""
    yield from _region_patches(draft)
    is_enabled = draft.attribute(torch, "is_autocast_enabled")
    yield Patch(torch, "is_autocast_enabled", _answering(is_enabled))


def _region_patches(draft: Draft) -> Iterator[Patch]:
    """Notes regions, and counts them: calls outside of any need not ask whether autocast is on."""
    enter = draft.attribute(torch.autocast, "__enter__")
    leave = draft.attribute(torch.autocast, "__exit__")
    is_any_enabled = torch._C._is_any_autocast_enabled

    def earlier() -> str:
        """Stands for those regions of this thread that no wrapper has counted."""
        return f"autocast before convert in {threading.get_ident()}"

    if is_any_enabled():
        count_autocast(earlier(), +1)

    @functools.wraps(enter)
    def noted_enter(self: torch.autocast) -> Any:
        region = None
        try:
            if is_covered(self.device):
                region = _region(self, sys._getframe(1))
                open_region(region)
            else:
                count_autocast(id(self), +1)
            return enter(self)
        except BaseException:  # a signal's, or torch's own: there will be no exit
            if region is None:
                count_autocast(id(self), -1)
            close_region(region)
            raise

    @functools.wraps(leave)
    def noted_exit(self: torch.autocast, *exc_info: Any) -> Any:
        region = None
        try:
            try:
                return leave(self, *exc_info)
            finally:
                region = last_region(self)
                close_region(region)
                if region is None:
                    count_autocast(id(self), -1)
                if not is_any_enabled():
                    count_autocast(earlier(), -1)
        except BaseException:  # a signal's, which must not keep casts off
            close_region(region or last_region(self))
            raise

    yield Patch(torch.autocast, "__enter__", noted_enter)
    yield Patch(torch.autocast, "__exit__", noted_exit)


def _region(autocast: torch.autocast, frame: types.FrameType | None) -> Region:
    """Returns the region that ``autocast`` opens, entered from ``frame``."""
    while frame is not None and _module(frame) in _BETWEEN:
        frame = frame.f_back
    if frame is not None and frame.f_code is _BACKWARD:
        # The state of the forward, which torch itself asks to be that of autocast only.
        return Region(autocast, off=getattr(frame.f_locals["args"][0], _FORWARD_STATE, None))
    device = frozenset([autocast.device])
    if autocast._enabled:
        return Region(autocast, less=device)
    return Region(autocast, more=ON if _restores(frame) else device)


#: Modules through which a region is entered on behalf of others.
_BETWEEN: Final = {"contextlib", "torch.cuda.amp.autocast_mode", "torch.cpu.amp.autocast_mode"}

#: Modules of torch that open the regions that a user's code has asked for.
_OPENERS: Final = (
    "torch.amp.autocast_mode",  # decorators, and graphs
    "torch._higher_order_ops.wrap",
    "torch._dynamo.variables.higher_order_ops",
)


def _restores(frame: types.FrameType | None) -> bool:
    """Whether torch itself enters a region there, to restore a state that it has asked for before.

    Which says nothing of casts: in DataParallel's replicas, recomputation, traced backwards.
    """
    module = "" if frame is None else _module(frame)
    return module.startswith("torch.") and module not in _OPENERS


def _module(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


# --- custom_fwd and custom_bwd ----------------------------------------------------------------


def _code_in(function: Any, name: str) -> types.CodeType | None:
    """Returns the code of the function ``name`` that is defined inside of ``function``."""
    codes = [c for c in function.__code__.co_consts if isinstance(c, types.CodeType)]
    return next((code for code in codes if code.co_name == name), None)


# Libraries have decorated their functions before there is a conversion; the code is always the same.
_FORWARD: Final = _code_in(torch.amp.autocast_mode.custom_fwd, "decorate_fwd")
_BACKWARD: Final = _code_in(torch.amp.autocast_mode.custom_bwd, "decorate_bwd")

#: Attribute of a custom function's context: what is off in its forward.
_FORWARD_STATE: Final = "_hmpx_off"


def _answer_forward(frame: types.FrameType, is_enabled: bool, device_type: str) -> bool:
    """Returns whether a forward with ``cast_inputs`` casts them, and runs in a region that is off."""
    opens = frame.f_locals["cast_inputs"] is not None and (is_enabled or has_casts(device_type))
    state = off() | ({device_type} if opens and is_covered(device_type) else ON)
    setattr(frame.f_locals["args"][0], _FORWARD_STATE, state)
    return opens or is_enabled


# --- who asks ---------------------------------------------------------------------------------


def _answering(is_enabled: Callable[..., bool]) -> Callable[..., bool]:
    """Returns `torch.is_autocast_enabled` such that it knows of casts, where that decides on a region.

    Much code opens a region with ``enabled=False`` only where it finds autocast on.
    """

    @functools.wraps(is_enabled)
    def answering(*args: Any, **kwargs: Any) -> bool:
        answer = is_enabled(*args, **kwargs)
        device_type = args[0] if args else kwargs.get("device_type", "cuda")
        asker = _asker(sys._getframe(1))
        if asker is None:
            return answer
        if asker.f_code is _FORWARD:
            return _answer_forward(asker, answer, device_type)
        return answer or (
            _opens_regions(asker.f_code)
            and not str(asker.f_globals.get("__name__")).startswith("torch.")
            and has_casts(device_type)
        )

    run_when_traced(answering)
    return answering


def _asker(frame: Any) -> Any:
    """Returns the frame that asks: where torch.compile does, what it is tracing."""
    if not _module(frame).startswith("torch._dynamo."):
        return frame
    while frame is not None:
        if frame.f_code.co_name == "step" and hasattr(frame.f_locals.get("self"), "f_code"):
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


@functools.lru_cache(maxsize=256)
def _opens_regions(code: types.CodeType) -> bool:
    """Whether ``code`` asks whether autocast is on, and opens a region by ``autocast(enabled=...)``."""
    if not {"is_autocast_enabled", "autocast"} <= set(code.co_names):
        return False
    return any(isinstance(names, tuple) and "enabled" in names for names in code.co_consts)
