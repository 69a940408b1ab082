"""Finds the earlier roundings that led to a call's failure, by running the calls that led to it again."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Container, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ..errors import passing_over
from ..number_formats import quantize
from ..observers import OpCall
from ..ops import draws
from ..patching import unpatched
from ..tensors import CAST, LOW_DTYPES, PLAIN_TENSORS, is_dense, is_floating, version_of
from .records import NAN, CallRecord, Leaf, Trial, alive, storage_of
from .trials import (
    CONVERTING,
    Arguments,
    Gradients,
    aside,
    bits_in,
    is_emulated,
    is_low_call,
    outcome,
    placeholder,
    upcast,
)

_clone, _detach = unpatched(Tensor.clone, Tensor.detach)

#: Tensors up to this many bytes are kept until the end of the step; larger ones serve if they still exist.
_MOST_BYTES: Final = 1 << 13

#: Most calls that are run again.
MOST_CALLS: Final = 400

#: Most calls that are tried alone in float32, the last ones; then all calls of an op together, as lists do.
_MOST_ALONE: Final = 100

#: Most calls of which each is left out, to see whether the others are enough.
_MOST_PRUNED: Final = 20


class Held:
    """A tensor as a call took it, or left it if it wrote to it; it may be gone or changed since."""

    __slots__ = ("is_floating", "is_written", "layout", "reference", "requires_grad", "version")

    def __init__(self, tensor: Tensor, written: Container[int]) -> None:
        self.is_floating, self.requires_grad = is_floating(tensor), tensor.requires_grad
        self.reference: Callable[[], Tensor | None] = lambda: None
        if type(tensor) not in PLAIN_TENSORS or not is_dense(tensor):
            return
        self.version = version_of(tensor)
        self.layout = tensor.shape, tensor.stride(), tensor.storage_offset()
        self.is_written = storage_of(tensor)._cdata in written
        self.reference = weakref.ref(tensor)
        if tensor.nbytes <= _MOST_BYTES:
            kept = _detach(tensor) if tensor.requires_grad else tensor  # without its graph
            if self.is_written:  # and it will be again
                kept = _clone(kept)
                self.version = version_of(kept)
            self.reference = lambda: kept

    def tensor(self) -> Tensor | None:
        """Returns the tensor, unless it is gone or changed."""
        found = alive(self.reference)
        return found if found is not None and version_of(found) == self.version else None


class _Chain:
    """The calls that led to a failed one, which is the last.

    ``is_whole``: nothing before them was rounded, as far as known.
    """

    def __init__(self, failed: CallRecord, records: Sequence[CallRecord]) -> None:
        self._makers = {id(cell): record for record in records for cell in record.results}
        self._sources: dict[int, list[Any]] = {}  # ids of cells, or tensors
        self.calls: list[CallRecord] = []
        self.is_whole = True
        self.has_stand_ins = False
        self.stopped_at: OpCall | None = None
        self.is_known = self._add(failed)

    def _add(self, record: CallRecord) -> bool:
        """Adds a call behind those that it needs; returns whether its inputs are known."""
        if id(record) in self._sources:
            return True
        held = _held(record)
        if record.given is None or len(held) != len(record.inputs):
            return False
        sources: list[Any] = []
        for each, given in zip(held, record.inputs, strict=True):
            maker = self._makers.get(id(given.cells[0])) if len(given.cells) == 1 else None
            if maker is not None and (draws(maker.call.op) or maker.call.op == "setitem"):
                maker = None
            if maker is not None and len(self.calls) < MOST_CALLS and self._add(maker):
                sources.append(id(given.cells[0]))
            elif (tensor := each.tensor()) is not None:
                # What the call has written stands for what was there: likely as small, or as large.
                sources.append(tensor)
                is_given = isinstance(given.cells[0], Leaf) or tensor.dtype not in LOW_DTYPES
                if each.is_written or not is_given:
                    self.is_whole = False
                    self.has_stand_ins |= each.is_written
                    before = maker if maker is not None else record if each.is_written else None
                    self.stopped_at = self.stopped_at if before is None else before.call
            else:
                self.stopped_at = record.call if maker is None else maker.call
                return False
        self._sources[id(record)] = sources
        self.calls.append(record)
        return True

    def run(
        self,
        exact: Collection[CallRecord],
        gradients: Gradients | None,
        dtype: torch.dtype = torch.float32,
        *,
        casts_gradients: bool = True,
    ) -> tuple[int, list[Tensor]]:
        """Returns the bits of the failed call's results or gradients, and its inputs, with ``exact`` in a dtype."""
        made: dict[int, Tensor] = {}
        for record in self.calls:
            call, inputs = record.call, []
            for each, source in zip(_held(record), self._sources[id(record)], strict=True):
                tensor = made[source] if isinstance(source, int) else source
                if (tensor.shape, tensor.stride(), tensor.storage_offset()) != each.layout:
                    tensor = tensor.as_strided(*each.layout)
                inputs.append(tensor.detach())
            is_last = record is self.calls[-1]
            if call.op in CONVERTING and record in exact:
                results = [_up(inputs[-1], dtype)]
            else:
                args, kwargs = record.given
                arguments = Arguments(_filled(args), {k: _filled(v) for k, v in kwargs.items()})
                given = _cast(call, inputs, dtype if record in exact else None)
                dtypes = [each.dtype for each in inputs if casts_gradients]
                results = outcome(call, arguments, given, gradients if is_last else None, dtypes)
                target = next(
                    (e.dtype for e, h in zip(inputs, _held(record), strict=True) if h.is_written),
                    None,
                )
                if target in LOW_DTYPES and record not in exact:
                    results = [CAST[target](each) for each in results]
            if is_last:
                return bits_in(results), inputs
            made |= {id(cell): each for cell, each in zip(record.results, results, strict=True)}
        raise AssertionError("a chain has a last call")


def _held(record: CallRecord) -> list[Held]:
    args, kwargs = record.given or ((), {})
    found: list[Held] = []

    def add(value: Any) -> None:
        if isinstance(value, Held):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            for each in value:
                add(each)

    add([args, *kwargs.values()])
    return [each for each in found if each.is_floating]


def _filled(value: Any) -> Any:
    """Returns arguments with tensors again: those that are not floating, and placeholders."""
    if isinstance(value, (list, tuple)):
        items = [_filled(each) for each in value]
        return tuple(items) if isinstance(value, tuple) else items
    if not isinstance(value, Held):
        return value
    if value.is_floating:
        return placeholder(0, value.requires_grad)
    if (tensor := value.tensor()) is None:
        raise ValueError("an argument is gone")
    return tensor


def _cast(call: OpCall, inputs: list[Tensor], exact: torch.dtype | None) -> list[Tensor]:
    """Returns inputs in ``exact``, or as the policy casts them if some may have become wider."""
    target: Any = call.dtype
    if exact is not None or call.cast_policy == "FP32":
        return [_up(each, exact or torch.float32) for each in inputs]
    if is_emulated(call):
        return [quantize(each, target) for each in inputs]
    if call.cast_policy == "LOW" and len(inputs) == len(call.cast_dtypes):
        return [CAST[d](e) for e, d in zip(inputs, call.cast_dtypes, strict=True)]
    dtypes = tuple([each.dtype for each in inputs])
    if dtypes == call.cast_dtypes or len(set(dtypes)) == 1:
        return inputs
    is_double = torch.float64 in dtypes
    return [_up(each, torch.float64 if is_double else torch.float32) for each in inputs]


def _up(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype is torch.float32 and dtype is torch.float64:
        return tensor.double()
    return upcast(tensor).to(dtype) if tensor.dtype in LOW_DTYPES else tensor


def traced_back(
    failed: CallRecord,
    records: Sequence[CallRecord],
    trial: Trial | None,
    gradients: Gradients | None = None,
) -> Trial | None:
    """Returns the outcome of a failed call with earlier calls in float32, and the fewest that are enough.

    ``trial`` is that of the call alone, which is not finite in float32 either, or was not tried.
    """
    with aside([]), passing_over(Exception):
        chain = _Chain(failed, records)
        if not chain.is_known:
            return _stopped(failed, trial, chain)
        enough: Sequence[CallRecord] = ()
        low = [each for each in chain.calls if _can_change(each)]
        dtype = torch.float32 if low else torch.float64
        bits, exact_inputs = chain.run(chain.calls, gradients, dtype)
        if bits and not chain.run(chain.calls, gradients, dtype, casts_gradients=False)[0]:
            return Trial(0, is_cast=True)
        if bits or (not low and not chain.run([failed], gradients, dtype)[0]):
            return trial if chain.is_whole else _stopped(failed, trial, chain)
        ops = [*dict.fromkeys([each.call.op for each in reversed(low)])]
        one_op = [[each for each in low if each.call.op == op] for op in ops]
        candidates = [[each] for each in reversed(low[-_MOST_ALONE:])] + one_op
        if not low:  # what float32 loses, it loses over several calls
            candidates = [chain.calls[start:] for start in reversed(range(len(chain.calls)))]
        for candidate in candidates:
            enough = candidate
            if not chain.run(enough, gradients, dtype)[0]:
                break
        else:
            enough = chain.calls
        for op in dict.fromkeys([each.call.op for each in reversed(enough)]):
            fewer = [each for each in enough if each.call.op != op]
            if fewer and not chain.run(fewer, gradients, dtype)[0]:
                enough = fewer
        for each in enough if 1 < len(enough) <= _MOST_PRUNED else ():
            fewer = [other for other in enough if other is not each]
            if not chain.run(fewer, gradients, dtype)[0]:
                enough = fewer
        inputs = chain.run([], gradients)[1]
        is_zero = [((a == 0) & (b != 0)).any() for a, b in zip(inputs, exact_inputs, strict=True)]
        causes = tuple(
            [
                dataclasses.replace(each.call, cast_policy="TARGET") if each.writes else each.call
                for each in enough
            ]
        )
        found = Trial(0, is_underflow=any(map(bool, is_zero)), is_known=not chain.has_stand_ins)
        return found._replace(causes=causes, is_double=not low)
    return None if trial is None else trial._replace(is_known=False)


def _stopped(failed: CallRecord, trial: Trial | None, chain: _Chain) -> Trial | None:
    """Returns a trial whose earlier calls could not be repeated."""
    if trial is None and not is_low_call(failed.call):
        trial = Trial(NAN)  # it ran in float32
    return trial and trial._replace(is_known=False, stopped_at=chain.stopped_at)


def _can_change(record: CallRecord) -> bool:
    return is_low_call(record.call) and record.call.cast_policy != "FP32"
