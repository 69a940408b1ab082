"""Fake tensors: their mode, its errors, and absent devices.

Without support for an accelerator, torch can't copy or differentiate fake tensors on it, since it has no
device guard for it. So these tensors are on the CPU, with an index that no other tensor has, and report the
accelerator to Python: decisions by device read that.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..errors import passing_over
from .modes import FakeTensor, has_fake_tensors, storage_of

_data_ptr: Final = Tensor.data_ptr  # read before anything is patched

#: The device of stand-ins.
HERE: Final = torch.device("cpu", 0)


def fake_mode() -> Any:
    """Returns a new mode in which tensors have no values, and real ones become fake on use."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes long to import

    return FakeTensorMode(allow_non_fake_inputs=True)


def needs_values(error: BaseException) -> str:
    """Returns the op in a fake tensor's error about a result that depends on values; ``""`` for other errors."""
    is_it = _is_named(error, "DataDependentOutputException", "DynamicOutputShapeException")
    return str(getattr(error, "func", "")) if is_it else ""


def lacks_kernel(error: BaseException) -> str:
    """Returns the op in an error about a missing kernel for fake tensors; ``""`` for other errors."""
    is_it = _is_named(error, "UnsupportedOperatorException")
    return str(getattr(error, "func", "")) if is_it else ""


def differs_in_devices(error: BaseException) -> bool:
    """Whether an error is about fake tensors on several devices."""
    # Before torch 2.13 it had no class of its own.
    is_it = _is_named(error, "FakeTensorDeviceMismatchError")
    return is_it or "found two different devices" in str(error)


def _is_named(error: BaseException, *names: str) -> bool:
    from torch._subclasses import fake_tensor  # takes long to import

    found = [getattr(fake_tensor, name) for name in names if hasattr(fake_tensor, name)]
    return isinstance(error, tuple(found))


class _Hidden(type):
    """The class of the stand-in for `FakeTensor` that other libraries see."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, FakeTensor) and not is_planned()


class _PlanningState(threading.local):
    """Whether fake tensors stand for real ones in a thread."""

    plans = False


_here: Final = _PlanningState()

#: In how many threads they do: checked first, since torch.compile can't trace thread-locals.
_planning = 0


def is_planned() -> bool:
    """Whether fake tensors stand for real ones here, rather than for a graph."""
    return _planning > 0 and _here.plans


def passes_for_real(tensor: Tensor) -> bool:
    return _planning > 0 and _here.plans and isinstance(tensor, FakeTensor)


def address_of(tensor: Tensor) -> int:
    """Returns a number that identifies a tensor's first element among live tensors; 0 if it is empty."""
    if _planning > 0 and isinstance(tensor, FakeTensor):
        if not tensor.numel():
            return 0
        offset: int = tensor.storage_offset() * tensor.element_size()
        return int(storage_of(tensor)._cdata) + offset
    return int(_data_ptr(tensor))


@contextlib.contextmanager
def planning() -> Iterator[None]:
    """Makes fake tensors stand for real ones, in this thread, for hmpx and for libraries that check.

    With fake tensors, transformers runs other code: it creates masks that are not needed, and copies keys.
    """
    import torch._subclasses

    global _planning
    owner: Any = torch._subclasses
    found = owner.FakeTensor
    before = _here.plans
    owner.FakeTensor = _Hidden("FakeTensor", (), {})
    _here.plans = True
    _planning += 1
    try:
        yield
    finally:
        _planning -= 1
        _here.plans = before
        owner.FakeTensor = found


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps torch from logging errors of fake tensors' kernels, which are also raised."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


@contextlib.contextmanager
def standing_in(device_type: str) -> Iterator[None]:
    """Puts fake tensors of an absent device type on the CPU during the block."""
    from torch import _meta_registrations
    from torch._subclasses.fake_tensor import FakeTensorMode

    shown = torch.device(device_type, 0)
    device: Any = vars(FakeTensor)["device"]
    # Gets a new fake tensor's device. Before torch 2.12 that is the constructor.
    name = next(each for each in ("_normalize_fake_device", "__new__") if hasattr(FakeTensor, each))
    original: Callable[..., Any] = getattr(FakeTensor, name)

    def seen(self: Any) -> torch.device:
        found: torch.device = device.__get__(self)
        return shown if found == HERE else found

    def placed(*args: Any, **kwargs: Any) -> Any:
        named = {key: here(value, device_type) for key, value in kwargs.items()}
        return original(*[here(value, device_type) for value in args], **named)

    FakeTensor.device = property(seen, device.__set__)
    setattr(FakeTensor, name, staticmethod(placed))
    flag = f"is_{device_type}"
    has_flag = hasattr(Tensor, flag)
    if has_flag:
        setattr(FakeTensor, flag, property(lambda self: seen(self) == shown))
    meta: Any = _meta_registrations
    hint: Callable[[Any], str] = meta.device_hint

    def hinted(tensor: Any) -> str:
        is_here = isinstance(tensor, FakeTensor) and tensor.fake_device == HERE
        return device_type if is_here else hint(tensor)

    meta.device_hint = hinted
    lacks_module = not hasattr(torch, device_type)
    if lacks_module:  # checkpoints ask it about the RNG state
        absent = types.ModuleType(f"torch.{device_type}")
        vars(absent).update(_initialized=False, device_count=lambda: 0)
        vars(absent).update(dict.fromkeys(("is_available", "is_initialized"), lambda: False))
        setattr(torch, device_type, absent)
    FakeTensorMode.cache_clear()  # its cached calls name the devices
    try:
        yield
    finally:
        FakeTensorMode.cache_clear()
        if lacks_module:
            delattr(torch, device_type)
        meta.device_hint = hint
        FakeTensor.device = device
        setattr(FakeTensor, name, staticmethod(original))
        if has_flag:
            delattr(FakeTensor, flag)


def here(value: Any, device_type: str) -> Any:
    """Returns an argument for stand-ins: a device of this type becomes their device."""
    if isinstance(value, (str, torch.device)):
        with passing_over(RuntimeError):
            return HERE if torch.device(value).type == device_type else value
    return value


@contextlib.contextmanager
def replacing_parameters() -> Iterator[None]:
    """Allows casting and moving modules of fake tensors, whose parameters torch refuses to swap."""
    owner: Any = nn.Module
    apply: Callable[..., Any] = owner._apply
    replaced: dict[int, tuple[Any, nn.Parameter]] = {}
    depth = 0

    def replacing(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        nonlocal depth
        if not has_fake_tensors():
            return apply(self, fn, recurse)
        depth += 1
        try:
            for child in self.children() if recurse else ():
                each: Any = child
                each._apply(fn)
            for name, parameter in self._parameters.items():
                if parameter is not None:
                    self._parameters[name] = _replaced(parameter, fn, replaced)
            for name, buffer in self._buffers.items():
                if buffer is not None:
                    self._buffers[name] = fn(buffer)
        finally:
            depth -= 1
            if not depth:
                replaced.clear()
        return self

    owner._apply = replacing
    try:
        yield
    finally:
        owner._apply = apply


def _replaced(
    parameter: nn.Parameter,
    fn: Callable[[Tensor], Tensor],
    replaced: dict[int, tuple[Any, nn.Parameter]],
) -> nn.Parameter:
    """Returns a parameter's replacement: the same one for a shared parameter."""
    known = replaced.get(id(parameter))
    if known is not None:
        return known[1]
    with torch.no_grad():
        found = fn(parameter)
    is_other = found is not parameter
    new = nn.Parameter(found, requires_grad=parameter.requires_grad) if is_other else parameter
    replaced[id(parameter)] = parameter, new  # held, so that its id stays unique
    return new
