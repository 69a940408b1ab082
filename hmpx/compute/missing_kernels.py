"""Ops whose kernels lack a low-precision dtype: they compute in fp32, whichever list they are in.

A program that runs in fp32 must not stop because an earlier op has made its tensors low-precision.
Which ops lack a kernel, and where, is data: ``kernels.ini``, made by ``scripts/missing_kernels.py``. This
completes torch's functions and is not a cast: it also holds inside `disable_casts`, and on any device.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from ..data_files import read_sections
from ..device_types import DEVICE_TYPES
from ..ops import parameter_named
from ..places import PACKAGE, with_callers
from ..tensors import CAST, LOW_DTYPES, Args, Kwargs, map_tensors, short_name, tensors_in
from ..torch_internals import is_jit_tracing, run_when_traced
from ..torch_state import is_below_dispatcher, without_casts
from .composition import inputs_of, names_dtype, widen
from .graphs import is_exported
from .selecting import argument, with_fp32_gradients
from .watching import note_legalized

LOGGER: Final = logging.getLogger("hmpx")

# Taken before anything is patched.
_copy_, _resize_ = Tensor.copy_, Tensor.resize_

#: Where a kernel is missing: the device type, and the dtype.
Place = tuple[str, torch.dtype]


@dataclass(frozen=True)
class Lacking:
    """Where the kernels of one op lack a low-precision dtype.

    Attributes:
        only: Name of the argument that must be true for that, or have the value after it;
            ``uncoalesced`` for calls on sparse tensors with equal indices; empty for all calls.
    """

    always: frozenset[Place] = frozenset()  # where no call runs
    sometimes: frozenset[Place] = frozenset()  # where some calls run, and others don't
    backward: frozenset[Place] = frozenset()  # where the gradients have no kernel
    only: tuple[str, ...] = ()

    @functools.cached_property
    def dtypes(self) -> frozenset[torch.dtype]:
        """Those for which a kernel is missing on some device type."""
        return frozenset(dtype for _, dtype in self.always | self.sometimes | self.backward)

    @property
    def is_of_gradients(self) -> bool:
        """Whether every forward has its kernel."""
        return not (self.always or self.sometimes)

    def lacks(self, first: Tensor, *, is_learning: bool) -> bool | None:
        """Whether a call with this first low-precision input has no kernel; None if only trying it can tell."""
        place = first.device.type, first.dtype
        if place in self.always or (is_learning and place in self.backward):
            return True
        if place[0] in KNOWN_DEVICES:
            return None if place in self.sometimes else False
        return None if first.dtype in self.dtypes else False


#: The device types that ``kernels.ini`` covers; on others, ops that lack a kernel anywhere are tried.
KNOWN_DEVICES: Final = frozenset([each.name for each in DEVICE_TYPES if each.has_kernel_table])


@functools.cache
def lacking_kernels() -> Mapping[str, Lacking]:
    """Returns op name -> where it lacks kernels, for the ops that do."""
    found: dict[str, dict[str, set[Place]]] = {}
    only: dict[str, tuple[str, ...]] = {}
    for section, names in _facts().items():
        if section == "untried":
            continue
        device_type, dtype, how = section.split()
        for name, condition in names.items():
            only[name] = tuple(condition.split())
            places = found.setdefault(
                name, {"always": set(), "sometimes": set(), "backward": set()}
            )
            places[how].add((device_type, getattr(torch, dtype)))
    made = {
        name: Lacking(**{how: frozenset(each) for how, each in places.items()}, only=only[name])
        for name, places in found.items()
    }
    return types.MappingProxyType(made)


def _facts() -> Mapping[str, Mapping[str, str]]:
    return read_sections(__package__, "kernels.ini")


@dataclass(frozen=True, slots=True)
class Callee:
    """One of torch's functions, described as far as computing it in fp32 requires."""

    op: str  # op name
    function: Callable[..., Any]  # torch's function
    names: tuple[str, ...]  # its parameters by position
    writes: frozenset[str]  # the parameters it writes to, apart from ``out``
    is_python: bool  # it is implemented in Python: nothing inside it is cast
    is_random: bool  # it draws random numbers
    promotes: bool = False  # its kernel takes mixed dtypes, and computes in the widest
    selects: bool = False  # it returns elements of its first input


def completed(callee: Callee, lacking: Lacking) -> Callable[..., Any]:
    """Wraps torch's function to compute in fp32 where its kernel is missing.

    Floating-point results have the dtype of the first floating-point input; complex ones stay complex64.
    """
    original, has_writes = callee.function, bool(callee.writes)

    def complete(*args: Any, **kwargs: Any) -> Any:
        inputs = inputs_of(args, kwargs)
        low = None if inputs is None else inputs.low
        if inputs is None or low is None or is_below_dispatcher():
            return original(*args, **kwargs)
        # Exported programs run without gradients. torch.jit.trace checks that, and compares lines of calls, too.
        is_learning = inputs.is_learning and not (lacking.is_of_gradients and is_exported())
        lacks = lacking.lacks(low, is_learning=is_learning)
        is_mixed = lacks is not False and _widest(args, kwargs) not in LOW_DTYPES
        if lacks is False or (callee.promotes and is_mixed):
            return original(*args, **kwargs)
        if lacking.only and not _holds(lacking.only, callee, args, kwargs):
            return original(*args, **kwargs)
        if lacks and lacking.is_of_gradients and not is_mixed and kwargs.get("out") is None:
            if not callee.selects:
                _note(callee.op, short_name(low.dtype), low.device.type)
            return with_fp32_gradients(callee, args, kwargs, inputs)
        # A failed try may leave what it writes to half-done. While torch.compile traces, kernels don't fail yet,
        # and a call that fails breaks the graph of torch.jit.trace.
        is_traced = torch.compiler.is_dynamo_compiling() or is_jit_tracing()
        may_run = lacks is None or is_mixed  # its kernel may promote, and return fp32
        if may_run and not (has_writes or kwargs.get("out") is not None or is_traced):
            return _tried(callee, args, kwargs, low, inputs.first.dtype)
        _note(callee.op, short_name(low.dtype), low.device.type)
        return in_fp32(callee, args, kwargs, inputs.first.dtype)

    return complete


def _holds(only: tuple[str, ...], callee: Callee, args: Args, kwargs: Kwargs) -> bool:
    """Whether the argument has the value that ``only`` names, or is true."""
    name, *values = only
    if name == "uncoalesced":  # a sparse input has several elements in one place
        first = tensors_in((*args, *kwargs.values()))[0]
        return first.is_sparse and not first.is_coalesced()
    given = argument(name, callee.names, args, kwargs)
    return given in values if values else bool(given)


def _widest(args: Args, kwargs: Kwargs) -> torch.dtype:
    """Returns the dtype that a type-promoting kernel computes in; 0-dim tensors count last."""
    named = [value for name, value in kwargs.items() if name != "out"]
    floating = [v for v in (*args, *named) if isinstance(v, Tensor) and v.is_floating_point()]
    dtypes = [t.dtype for t in floating if t.dim()] or [t.dtype for t in floating]
    return functools.reduce(torch.promote_types, dtypes)


def _tried(callee: Callee, args: Args, kwargs: Kwargs, low: Tensor, dtype: torch.dtype) -> Any:
    """Returns the result of torch's function, computed in fp32 if it refuses the dtype."""
    generator = _generator(kwargs, low) if callee.is_random else None
    state = None if generator is None else generator.get_state()
    try:
        return callee.function(*args, **kwargs)
    except Exception as error:
        if not is_refusal(error):
            raise
        if generator is not None:
            generator.set_state(state)
    result = in_fp32(callee, args, kwargs, dtype)
    _note(callee.op, short_name(low.dtype), low.device.type)
    return result


#: Exceptions by which torch's functions reject a dtype. Subclasses mean something else.
_REFUSALS: Final = frozenset({NotImplementedError, RuntimeError})

#: Their messages: about dtypes, or from oneDNN, cuBLAS and cuDNN about a missing kernel.
_REFUSING: Final = re.compile(
    "float16|half|bf16|fp16|R_16B?F|type|precision|create a primitive|find an engine"
    "|no available kernel|STATUS_NOT_SUPPORTED|STATUS_ARCH_MISMATCH",
    re.IGNORECASE,
)


def is_refusal(error: Exception, library: str = "torch") -> bool:
    """Whether torch's function, or that of another ``library``, itself raised ``error`` because of dtypes.

    Signal handlers, modes and hooks raise in frames of their own. Asynchronous exceptions have no message.
    """
    if type(error) not in _REFUSALS or not _REFUSING.search(str(error)):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    packages = {str(frame.f_globals.get("__name__")).partition(".")[0] for frame in frames}
    return packages <= {PACKAGE, "torch", library}


def may_run_again(error: Exception, library: str = "torch") -> bool:
    """Whether a call that ``error`` ended may run again: see `is_refusal`.

    Not in torch.jit.trace: a call that fails takes the state of the trace with it, and the process ends if the
    traced function goes on.
    """
    modules = [frame.f_globals.get("__name__") for frame in with_callers(sys._getframe())]
    return is_refusal(error, library) and torch.jit.trace.__module__ not in modules


def _generator(kwargs: Kwargs, low: Tensor) -> Any:
    """Returns the generator that a random op draws from; None if there is none."""
    if kwargs.get("generator") is not None:
        return kwargs["generator"]
    if low.device.type == "cuda":
        return torch.cuda.default_generators[low.device.index or 0]
    return torch.default_generator if low.device.type == "cpu" else None


def in_fp32(callee: Callee, args: Args, kwargs: Kwargs, dtype: torch.dtype) -> Any:
    """Computes a call on low-precision inputs in fp32, and rounds to ``dtype`` if that is low.

    Tensors that the call writes to are written once it has succeeded.
    """
    stand_ins: list[tuple[Tensor, Tensor]] = []  # a tensor to write to, and its fp32 substitute

    def raised(value: Any, is_written: bool) -> Any:
        def widened(tensor: Tensor) -> Tensor:
            wide = widen(tensor) if tensor.dtype in LOW_DTYPES else tensor
            if is_written:
                stand_ins.append((tensor, wide))
            return wide

        return map_tensors(value, widened)

    names, writes = callee.names, callee.writes | {"out"}
    positional = [
        raised(value, position < len(names) and names[position] in writes)
        for position, value in enumerate(args)
    ]
    named = {
        name: raised(value, name == "out" or parameter_named(name, names) in writes)
        for name, value in kwargs.items()
    }
    with without_casts() if callee.is_python else contextlib.nullcontext():
        result = callee.function(*positional, **named)
    for target, wide in stand_ins:
        if target is wide:
            continue
        if target.shape != wide.shape:
            _resize_(target, wide.shape)
        _copy_(target, wide)
    is_rounded = dtype in LOW_DTYPES and not names_dtype(args, kwargs)

    def finished(tensor: Tensor) -> Tensor:
        for target, wide in stand_ins:
            if tensor is wide:
                return target
        return CAST[dtype](tensor) if is_rounded and tensor.dtype is torch.float32 else tensor

    return map_tensors(result, finished)


_noted: set[tuple[str, str, str]] = set()


def _note(op: str, dtype: str, device_type: str) -> None:
    """Notes that an op runs in fp32, and logs it once."""
    note_legalized()
    if (op, dtype, device_type) not in _noted:
        _noted.add((op, dtype, device_type))
        LOGGER.info("%s computes in fp32: %s has no %s kernel for it", op, device_type, dtype)


run_when_traced(_note)


def untried() -> Iterator[tuple[str, str]]:
    """Yields the ops for which missing kernels are undetermined, and why."""
    yield from _facts()["untried"].items()
