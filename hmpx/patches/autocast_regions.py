"""The effect of torch.autocast regions on a conversion.

A region with ``enabled=False`` means "fp32 here": it switches off the casts of its device type, and an
enabled region inside it switches them on again.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch.amp.autocast_mode

from .. import torch_internals, torch_state
from ..patching import Draft, Patch
from ..torch_state import is_enabled, off

_DTYPE_GETTERS: Final = ("get_autocast_dtype", "get_autocast_gpu_dtype")


def patches(draft: Draft, low_dtype: torch.dtype | None) -> Iterator[Patch]:
    """Yields the patches of torch.autocast, and of the functions that report its state.

    Regions are recorded, so that calls outside need not check whether autocast is on.
    """
    if torch_state.is_autocast_on():
        torch_state.note_autocast()

    def noted_enter(enter: Callable[..., Any], self: torch.autocast) -> Any:
        region = None
        try:
            if torch_state.is_covered(self.device):
                region = _region(self, sys._getframe(2))
                torch_state.open_region(region)
            else:
                torch_state.note_autocast()
            return enter(self)
        except BaseException:  # no exit follows
            torch_state.close_region(region)
            torch_state.settle_autocast()
            raise

    def noted_exit(leave: Callable[..., Any], self: torch.autocast, *exc_info: Any) -> Any:
        region = torch_state.last_region(self)
        try:
            return leave(self, *exc_info)
        finally:
            torch_state.close_region(region)
            torch_state.settle_autocast()

    yield draft.around(torch.autocast, "__enter__", noted_enter)
    yield draft.around(torch.autocast, "__exit__", noted_exit)
    is_enabled = draft.attribute(torch, "is_autocast_enabled")
    yield Patch(torch, "is_autocast_enabled", _answering(is_enabled, low_dtype is not None))
    for name in _DTYPE_GETTERS:
        dtype_of = draft.attribute(torch, name)
        yield Patch(torch, name, _telling(dtype_of, is_enabled, low_dtype))


def _region(autocast: torch.autocast, frame: types.FrameType | None) -> torch_state.Region:
    device = frozenset([autocast.device])
    if frame is not None and frame.f_code is torch_internals.CUSTOM_BACKWARD:
        ctx = frame.f_locals["args"][0]
        if (off := getattr(ctx, _FORWARD_OFF, None)) is not None:
            autocast._enabled = False  # the conversion's casts, as in the forward
            autocast.fast_dtype = torch.get_autocast_dtype(autocast.device)
            return torch_state.Region(autocast, off=off)
    if autocast._enabled:
        return torch_state.Region(autocast, less=device)
    if autocast.fast_dtype is _AS_AROUND:
        autocast.fast_dtype = torch.get_autocast_dtype(autocast.device)
        return torch_state.Region(autocast)
    while frame is not None and _module(frame) in _BETWEEN:
        frame = frame.f_back
    module = "" if frame is None else _module(frame)
    # In DataParallel's replicas, recomputation and traced backwards, torch restores a state that it has saved.
    restores = module.startswith("torch.") and module not in torch_internals.AUTOCAST_OPENERS
    return torch_state.Region(autocast, more=torch_state.ON if restores else device)


#: Modules through which a region is entered on behalf of others.
_BETWEEN: Final = {"contextlib", "torch.cuda.amp.autocast_mode", "torch.cpu.amp.autocast_mode"}


def _module(frame: Any) -> str:
    return str(frame.f_globals.get("__name__"))


# --- exported graphs --------------------------------------------------------------------------


def tracing_patches(draft: Draft) -> Iterator[Patch]:
    """Yields the patch that lets torch.export record regions when it traces a graph with regions.

    It records them in the new graph, without entering them.
    """

    def noting(  # noqa: PLR0917  # torch's, after the original
        handle: Any, self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        is_replayed = _module(sys._getframe(2)) != "torch.amp.autocast_mode"
        if is_replayed and func is torch_internals.enter_autocast:
            region = None
            autocast = torch.autocast(*args)
            if torch_state.is_covered(autocast.device):
                region = _region(autocast, None)
                region.opener = weakref.ref(self)  # a failed export leaves none open
                torch_state.open_region(region)
            vars(self).setdefault(_REPLAYED, []).append(region)
        elif is_replayed and func is torch_internals.exit_autocast:
            torch_state.close_region(vars(self)[_REPLAYED].pop())
        return handle(self, func, types, args, kwargs)

    mode = sys.modules[torch_internals.Later.TRACER].PreDispatchTorchFunctionMode
    yield draft.around(mode, "__torch_function__", noting)


#: Attribute of that mode: the regions that it has recorded and that are still open.
_REPLAYED: Final = "_hmpx_regions"


# --- custom_fwd and custom_bwd ----------------------------------------------------------------


#: Attribute of a context: what was off in a forward that ran outside autocast, with casts on. torch
#: then opens an enabled region for the backward. While torch is converted, casts are on there as in the
#: forward; afterwards torch.autocast casts there, since the gradients' dtypes require it.
_FORWARD_OFF: Final = "_hmpx_off"

#: The dtype of such a backward's region in graphs, and if outputs are fp32: torch then opens a disabled
#: region, which must have no effect. Autocast itself never uses this dtype.
_AS_AROUND: Final = torch.float64


def _telling(
    dtype_of: Callable[..., torch.dtype],
    is_autocast_enabled: Callable[..., bool],
    low_dtype: torch.dtype | None,
) -> Callable[..., torch.dtype]:
    """Makes ``dtype_of``, which returns autocast's dtype, reflect casts.

    `custom_bwd` thus learns of casts in the forward. Code that casts by hand to that dtype gets the
    conversion's own.
    """
    name = dtype_of.__name__

    @functools.wraps(dtype_of)
    def telling(*args: Any, **kwargs: Any) -> torch.dtype:
        dtype = dtype_of(*args, **kwargs)
        asker = _asker(sys._getframe(1), name)
        if asker is None:
            return dtype
        device_type = args[0] if args else kwargs.get("device_type", "cuda")
        if asker.f_code is torch_internals.CUSTOM_FORWARD:
            is_plain = not _casts_inputs(asker) and not is_enabled(device_type)
            if not is_plain or not torch_state.has_casts(device_type):
                return dtype
            if low_dtype is None or not isinstance(asker, types.FrameType):
                return _AS_AROUND
            setattr(asker.f_locals["args"][0], _FORWARD_OFF, off())
            return low_dtype
        if low_dtype is None or not _acts_on_casts(asker) or is_autocast_enabled(device_type):
            return dtype
        return low_dtype if torch_state.has_casts(device_type) else dtype

    torch_internals.run_when_traced(telling)
    return telling


def _casts_inputs(asker: Any) -> bool:
    name = "cast_inputs"
    if name in asker.f_locals:
        return asker.f_locals[name] is not None
    function = asker.funcvar.get_function()  # while torch.compile traces
    cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
    return cells[name].cell_contents is not None


# --- code that reads autocast's state ---------------------------------------------------------


def _answering(asked: Callable[..., bool], tells_dtype: bool) -> Callable[..., bool]:
    """Makes `torch.is_autocast_enabled` reflect casts, for code that acts on it.

    Much code opens a region with ``enabled=False`` only if autocast is on. Other code casts the inputs of
    custom kernels, such as FlashAttention's, to autocast's dtype.
    """

    @functools.wraps(asked)
    def answering(*args: Any, **kwargs: Any) -> bool:
        answer = asked(*args, **kwargs)
        device_type = args[0] if args else kwargs.get("device_type", "cuda")
        asker = _asker(sys._getframe(1), "is_autocast_enabled")
        if asker is None or answer or not torch_state.has_casts(device_type):
            return answer
        if asker.f_code is torch_internals.CUSTOM_FORWARD:
            is_real = isinstance(asker, types.FrameType)
            return _casts_inputs(asker) or (
                is_real and hasattr(asker.f_locals["args"][0], _FORWARD_OFF)
            )
        return _acts_on_casts(asker, tells_dtype=tells_dtype)

    torch_internals.run_when_traced(answering)
    return answering


def _asker(frame: Any, name: str) -> Any:
    """Returns the frame that calls ``name``; the traced frame if torch.compile evaluates the call.

    None if torch.compile itself saves and restores the state of autocast. Its own code then contains the
    name, unlike its code that evaluates traced functions.
    """
    if not torch_internals.is_dynamo_frame(frame):
        return frame
    if name in frame.f_code.co_names:
        return None
    while frame is not None:
        if frame.f_code.co_name == "step" and hasattr(frame.f_locals.get("self"), "f_code"):
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


def _acts_on_casts(asker: Any, *, tells_dtype: bool = True) -> bool:
    """Whether code outside torch is about to act on the state of autocast.

    It opens a region by ``autocast(enabled=...)``. Or it casts by hand, if ``tells_dtype``: then it also reads
    autocast's dtype, and nothing else. Code that also reads autocast's cache saves the state to restore it.
    """
    return not _module(asker).startswith("torch.") and _reads_to_act(asker.f_code, tells_dtype)


@functools.lru_cache(maxsize=256)
def _reads_to_act(code: types.CodeType, tells_dtype: bool) -> bool:
    names = set(code.co_names)
    if "is_autocast_enabled" not in names:
        return False
    if "autocast" in names:
        return any(isinstance(each, tuple) and "enabled" in each for each in code.co_consts)
    asks = tells_dtype and not names.isdisjoint(_DTYPE_GETTERS)
    return asks and "is_autocast_cache_enabled" not in names
