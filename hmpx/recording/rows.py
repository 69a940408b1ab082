"""Builds a report's rows from a recorder's counts, with FLOPs by torch's own formulas."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from ..number_formats import is_format
from ..observers import OpCall
from ..ops import facts
from ..reports import Row
from ..tensors import LOW_DTYPES, floating_in
from ..torch_internals import disable_modes
from ..torch_state import without_casts
from .signatures import Shape, Signature, rebuilt, tensors_of

if TYPE_CHECKING:
    from .recorder import Entry

#: The reason of a conversion in the program itself.
OWN_CAST: Final = "the program's own cast"


def forward_row(entry: Entry, *, is_timed: bool) -> Row:
    """Returns the row of the calls."""
    call, times = entry.call, entry.calls
    return _row(
        entry,
        phase=call.phase,
        calls=times,
        input_dtypes=_names(call.input_dtypes),
        cast_dtypes=_names(call.cast_dtypes),
        output_dtypes=_names(call.output_dtypes),
        casts=times * _casts(call),
        cast_bytes=times * call.cast_bytes,
        flops=times * _flops(entry).forward,
        bytes=times * (_input_bytes(entry) + _bytes(entry.outputs)),
        seconds=entry.seconds if is_timed else None,
    )


def backward_row(entry: Entry) -> Row:
    """Returns the row of the gradients: of results as input, and of inputs as output, in their own dtypes."""
    call, times = entry.call, entry.backward
    inputs = list(zip(entry.inputs, call.input_dtypes, call.cast_dtypes, strict=True))
    if call.reason == OWN_CAST:
        inputs = [(shape, given, call.output_dtypes[0]) for shape, given, _ in inputs]
    learning = [each for each in inputs if each[0].learns]
    cast = [
        shape
        for shape, given, run in learning
        if given is not run or (call.output_dtypes and _is_promoted(given, call))
    ]
    gradients = sum(shape.bytes // given.itemsize * run.itemsize for shape, given, run in learning)
    return _row(
        entry,
        phase="backward",
        calls=times,
        input_dtypes=_names(call.output_dtypes),
        cast_dtypes=_names(call.output_dtypes),
        output_dtypes=_names([given for _, given, _ in learning]),
        casts=times * len(cast),
        cast_bytes=times * _bytes(cast),
        flops=times * _flops(entry).backward,
        bytes=times * (_bytes(entry.outputs) + _input_bytes(entry) + gradients),
    )


def _row(entry: Entry, **values: Any) -> Row:
    call = entry.call
    return Row(
        op=call.op,
        site=call.site,
        module=call.module,
        location=call.location,
        device_type=call.device_type or "",
        cast_policy=call.cast_policy,
        reason=call.reason,
        dtype=_computed_in(call),
        legalized=call.legalized,
        **values,
    )


def _casts(call: OpCall) -> int:
    """Returns the number of tensors that one call cast, or rounded to a number format."""
    if call.reason == OWN_CAST:
        return 1
    if is_format(call.dtype):
        return len(call.input_dtypes)
    return sum(a is not b for a, b in zip(call.input_dtypes, call.cast_dtypes, strict=True))


def _is_promoted(given: torch.dtype, call: OpCall) -> bool:
    """Whether torch upcasts an input inside the op, and so casts its gradient to the input's dtype."""
    is_mixed = given in LOW_DTYPES and call.output_dtypes[0] is torch.float32
    return is_mixed and call.op in facts("promotes")


def _computed_in(call: OpCall) -> str:
    if is_format(call.dtype):
        return call.dtype.name
    dtype = call.output_dtypes[0] if call.reason == OWN_CAST else call.dtype
    if dtype is None:  # it was left alone: it computes in its inputs' dtype
        real = [each for each in call.cast_dtypes if each.is_floating_point] or call.cast_dtypes
        dtype = functools.reduce(torch.promote_types, real)
    assert isinstance(dtype, torch.dtype)
    return _name(dtype)


def _input_bytes(entry: Entry) -> int:
    """Returns the bytes of all inputs, the floating ones as cast."""
    given = _bytes(entry.inputs if entry.signature is None else tensors_of(entry.signature))
    for shape, run in zip(entry.inputs, entry.call.cast_dtypes, strict=True):
        given += shape.bytes // shape.dtype.itemsize * (run.itemsize - shape.dtype.itemsize)
    return given


def _bytes(shapes: Iterable[Shape]) -> int:
    return sum(shape.bytes for shape in shapes)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: Iterable[torch.dtype]) -> tuple[str, ...]:
    return tuple(map(_name, dtypes))


# --- floating-point operations -------------------------------------------------------------------


class Flops(NamedTuple):
    """Floating-point operations of a call, and of its gradients."""

    forward: int = 0
    backward: int = 0


def _flops(entry: Entry) -> Flops:
    """Returns the operations of one call; under `torch.func.vmap`, of the whole batch."""
    if entry.signature is None:
        return Flops()
    found = _flops_of(entry.call.function, entry.signature)
    times = max([shape.times for shape in entry.outputs], default=1)
    return Flops(found.forward * times, found.backward * times)


@functools.lru_cache(maxsize=10_000)
def _flops_of(function: Callable[..., Any], found: Signature) -> Flops:
    """Returns the operations of a call of torch's ``function``; zero if they depend on values.

    Repeats the call on tensors without memory, under torch's counter. So legalized and emulated calls count as
    the program made them.
    """
    from torch.utils.flop_counter import FlopCounterMode  # slow to import

    made: list[Tensor] = []

    def make(shape: Shape) -> Tensor:
        is_real = shape.dtype.is_floating_point
        dtype = torch.float32 if is_real and shape.dtype.itemsize < 4 else shape.dtype
        tensor = torch.empty(shape.sizes, dtype=dtype, device="meta", requires_grad=shape.learns)
        made.append(tensor)
        # In-place ops can't write to a leaf that requires gradients.
        return tensor.view_as(tensor) if shape.learns else tensor

    with disable_modes(), without_casts(), torch.enable_grad():
        args, kwargs = rebuilt(found, make)
        for name in ("device", "out", "generator"):
            kwargs.pop(name, None)
        try:
            with FlopCounterMode(display=False) as counter:
                result = function(*args, **kwargs)
            forward = counter.get_total_flops()
            learning = [tensor for tensor in made if tensor.requires_grad]
            results = [each for each in floating_in([result]) if each.requires_grad]
            if not (forward and learning and results):
                return Flops(forward)
            gradients = [torch.empty_like(each) for each in results]
            with FlopCounterMode(display=False) as counter:
                torch.autograd.grad(results, learning, gradients, allow_unused=True)
            return Flops(forward, counter.get_total_flops())
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            return Flops()  # its shapes depend on values, or it has no kernel without memory
