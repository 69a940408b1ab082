"""Finds the earlier roundings that led to a call's failure, by running the calls that led to it again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Container, Sequence
from typing import Any, Final

from torch import Tensor

from ..number_formats import quantize
from ..observers import OpCall
from ..ops import draws
from ..patching import unpatched
from ..tensors import CAST, LOW_DTYPES, PLAIN_TENSORS, is_dense, is_floating, version_of
from .records import CallRecord, Leaf, Trial, alive, storage_of
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

(_detach,) = unpatched(Tensor.detach)

#: Tensors of so many bytes are kept until the end of the step; larger ones serve if they still exist.
_MOST_BYTES: Final = 1 << 13

#: Most calls that are run again.
_MOST_CALLS: Final = 50


class Held:
    """A tensor as a call took it, which may be gone or changed since; gone if the call itself wrote to it."""

    __slots__ = ("is_floating", "layout", "reference", "requires_grad", "version")

    def __init__(self, tensor: Tensor, written: Container[int]) -> None:
        self.is_floating, self.requires_grad = is_floating(tensor), tensor.requires_grad
        self.reference: Callable[[], Tensor | None] = lambda: None
        if type(tensor) not in PLAIN_TENSORS or not is_dense(tensor):
            return
        self.version = version_of(tensor)
        self.layout = tensor.shape, tensor.stride(), tensor.storage_offset()
        if storage_of(tensor)._cdata in written:
            return
        self.reference = weakref.ref(tensor)
        if tensor.nbytes <= _MOST_BYTES:
            kept = _detach(tensor) if tensor.requires_grad else tensor  # without its graph
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
        self.is_known = self._add(failed)

    def _add(self, record: CallRecord) -> bool:
        """Adds a call behind those that it needs; returns whether its inputs are known."""
        if id(record) in self._sources:
            return True
        held = _held(record)
        if record.given is None or record.is_unsure or len(held) != len(record.inputs):
            return False
        sources: list[Any] = []
        for each, given in zip(held, record.inputs, strict=True):
            maker = self._makers.get(id(given.cells[0])) if len(given.cells) == 1 else None
            if maker is not None and (draws(maker.call.op) or maker.call.op == "setitem"):
                maker = None
            if maker is not None and len(self.calls) < _MOST_CALLS and self._add(maker):
                sources.append(id(given.cells[0]))
            elif (tensor := each.tensor()) is not None:
                sources.append(tensor)
                is_given = isinstance(given.cells[0], Leaf)
                self.is_whole = self.is_whole and (is_given or tensor.dtype not in LOW_DTYPES)
            else:
                return False
        self._sources[id(record)] = sources
        self.calls.append(record)
        return True

    def run(
        self,
        in_fp32: Collection[CallRecord],
        gradients: Gradients | None,
        *,
        casts_gradients: bool = True,
    ) -> tuple[int, list[Tensor]]:
        """Returns the bits of the failed call's results or gradients, and its inputs, with some calls in float32."""
        made: dict[int, Tensor] = {}
        for record in self.calls:
            call, inputs = record.call, []
            for each, source in zip(_held(record), self._sources[id(record)], strict=True):
                tensor = made[source] if isinstance(source, int) else source
                if (tensor.shape, tensor.stride(), tensor.storage_offset()) != each.layout:
                    tensor = tensor.as_strided(*each.layout)
                inputs.append(tensor.detach())
            is_last = record is self.calls[-1]
            if call.op in CONVERTING and record in in_fp32:
                results = [upcast(inputs[0])]
            else:
                args, kwargs = record.given
                arguments = Arguments(_filled(args), {k: _filled(v) for k, v in kwargs.items()})
                given = _cast(call, inputs, is_exact=record in in_fp32)
                dtypes = [each.dtype for each in inputs if casts_gradients]
                results = outcome(call, arguments, given, gradients if is_last else None, dtypes)
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


def _cast(call: OpCall, inputs: list[Tensor], *, is_exact: bool) -> list[Tensor]:
    """Returns inputs as the policy casts them, if some may have become float32."""
    if is_exact or call.cast_policy == "FP32":
        return list(map(upcast, inputs))
    target: Any = call.dtype
    if is_emulated(call):
        return [quantize(each, target) for each in inputs]
    if call.cast_policy == "LOW" and len(inputs) == len(call.cast_dtypes):
        return [CAST[d](e) for e, d in zip(inputs, call.cast_dtypes, strict=True)]
    dtypes = tuple([each.dtype for each in inputs])
    return (
        inputs if dtypes == call.cast_dtypes or len(set(dtypes)) == 1 else list(map(upcast, inputs))
    )


def traced_back(
    failed: CallRecord,
    records: Sequence[CallRecord],
    trial: Trial | None,
    gradients: Gradients | None = None,
) -> Trial | None:
    """Returns the outcome of a failed call with earlier calls in float32, and the fewest that are enough.

    ``trial`` is that of the call alone, which is not finite in float32 either, or was not tried.
    """
    unknown = None if trial is None else trial._replace(is_known=False)
    with aside([]):
        chain = _Chain(failed, records)
        if not chain.is_known:
            return unknown
        low = [each for each in chain.calls if _can_change(each)]
        bits, exact_inputs = chain.run(chain.calls, gradients)
        if gradients and bits and not chain.run(chain.calls, gradients, casts_gradients=False)[0]:
            return Trial(0, is_cast=True)
        if bits or not low:
            return None if trial is None else trial._replace(is_known=chain.is_whole)
        enough = next(([each] for each in low[::-1] if not chain.run([each], gradients)[0]), None)
        if enough is None:
            enough = low
            for each in low:
                fewer = [other for other in enough if other is not each]
                if not chain.run(fewer, gradients)[0]:
                    enough = fewer
        inputs = chain.run([], gradients)[1]
        is_zero = [
            bool(((a == 0) & (b != 0)).any()) for a, b in zip(inputs, exact_inputs, strict=True)
        ]
        return Trial(0, is_underflow=any(is_zero), causes=tuple([each.call for each in enough]))
    return unknown


def _can_change(record: CallRecord) -> bool:
    return is_low_call(record.call) and record.call.cast_policy != "FP32"
