"""Rows of a report, from what a recorder has counted."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import torch

from ..number_formats import Format
from ..observers import OpCall
from ..ops import facts
from ..reports import Row
from ..tensors import LOW_DTYPES
from .entries import OWN_CAST, Entry, Gradients
from .flops import NONE, Flops, flops
from .signatures import Shape, tensors_of


def rows(entries: Iterable[Entry], *, is_timed: bool) -> Iterator[Row]:
    """Yields the rows of what was called."""
    for entry in entries:
        yield _row(entry, is_timed=is_timed)


def backward_rows(gradients: Iterable[Gradients]) -> Iterator[Row]:
    """Yields the rows of gradients that were computed."""
    for entry, times in gradients:
        yield _backward_row(entry, times)


def _row(entry: Entry, *, is_timed: bool) -> Row:
    call = entry.call
    counted = _flops(entry)
    return Row(
        op=call.op,
        site=call.site,
        module=call.module,
        location=call.location,
        phase=call.phase,
        device_type=call.device_type or "",
        cast_policy=call.cast_policy,
        reason=call.reason,
        dtype=_computed_in(entry),
        input_dtypes=_names(call.input_dtypes),
        cast_dtypes=_names(call.cast_dtypes),
        output_dtypes=_names(call.output_dtypes),
        calls=entry.calls,
        casts=entry.calls * _casts(entry),
        cast_bytes=entry.calls * call.cast_bytes,
        flops=entry.calls * counted.forward,
        bytes=entry.calls * (_input_bytes(entry) + _bytes(entry.outputs)),
        seconds=entry.seconds if is_timed else None,
        legalized=call.legalized,
    )


def _flops(entry: Entry) -> Flops:
    """Returns the operations of one call; under `torch.func.vmap`, of all that it computes at a time."""
    if entry.signature is None:
        return NONE
    found = flops(entry.call.function, entry.signature)
    times = max([shape.times for shape in entry.outputs], default=1)
    return Flops(found.forward * times, found.backward * times) if found != NONE else NONE


def _casts(entry: Entry) -> int:
    """Returns how many tensors one call has cast, or rounded to a number format."""
    call = entry.call
    if call.reason == OWN_CAST:
        return 1
    if isinstance(call.dtype, Format):
        return len(call.input_dtypes)
    return sum(a is not b for a, b in zip(call.input_dtypes, call.cast_dtypes, strict=True))


def _backward_row(entry: Entry, times: int) -> Row:
    """Returns the row of gradients: of results taken in, and of inputs returned in their own dtypes."""
    call = entry.call
    counted = _flops(entry)
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
    return Row(
        op=call.op,
        site=call.site,
        module=call.module,
        location=call.location,
        phase="backward",
        device_type=call.device_type or "",
        cast_policy=call.cast_policy,
        reason=call.reason,
        dtype=_computed_in(entry),
        input_dtypes=_names(call.output_dtypes),
        cast_dtypes=_names(call.output_dtypes),
        output_dtypes=_names([given for _, given, _ in learning]),
        calls=times,
        casts=times * len(cast),
        cast_bytes=times * sum(shape.bytes for shape in cast),
        flops=times * counted.backward,
        bytes=times * (_bytes(entry.outputs) + _input_bytes(entry) + gradients),
        seconds=None,
        legalized=call.legalized,
    )


def _is_promoted(given: torch.dtype, call: OpCall) -> bool:
    """Whether torch upcasts an input inside the op, and so casts its gradient to the input's dtype."""
    is_mixed = given in LOW_DTYPES and call.output_dtypes[0] is torch.float32
    return is_mixed and call.op in facts("promotes")


def _computed_in(entry: Entry) -> str:
    call = entry.call
    if isinstance(call.dtype, Format):
        return call.dtype.name
    dtype = call.output_dtypes[0] if call.reason == OWN_CAST else call.dtype
    if dtype is None:  # it was left alone: it computes in what it is given
        real = [each for each in call.cast_dtypes if each.is_floating_point] or call.cast_dtypes
        dtype = functools.reduce(torch.promote_types, real)
    assert isinstance(dtype, torch.dtype)
    return _name(dtype)


def _input_bytes(entry: Entry) -> int:
    """Returns the bytes of all inputs, the floating ones as cast."""
    call = entry.call
    given = _bytes(entry.inputs if entry.signature is None else tensors_of(entry.signature))
    for shape, run in zip(entry.inputs, call.cast_dtypes, strict=True):
        given += shape.bytes // shape.dtype.itemsize * (run.itemsize - shape.dtype.itemsize)
    return given


def _bytes(shapes: Iterable[Shape]) -> int:
    return sum(shape.bytes for shape in shapes)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: Iterable[torch.dtype]) -> tuple[str, ...]:
    return tuple(map(_name, dtypes))
