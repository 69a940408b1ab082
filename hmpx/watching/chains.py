"""Finds the earlier roundings that led to a call's failure, by running the calls that led to it again."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..errors import passing_over
from ..number_formats import quantize
from ..observers import OpCall
from ..ops import draws
from ..patching import unpatched
from ..places import located
from ..tensors import (
    CAST,
    LOW_DTYPES,
    PLAIN_TENSORS,
    floating_in,
    is_dense,
    is_floating,
    version_of,
)
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
    text_of,
    upcast,
    values_at,
)

_clone, _detach = unpatched(Tensor.clone, Tensor.detach)

#: Tensors up to this many bytes are kept until the end of the step; larger ones serve if they still exist.
_MOST_BYTES: Final = 1 << 13

#: Most calls that are run again.
MOST_CALLS: Final = 400

#: Most places whose calls are tried in float32, the last ones; then all calls of an op together, as lists do.
_MOST_ALONE: Final = 100

#: Most calls of which each is left out, to see whether the others are enough.
_MOST_PRUNED: Final = 20


class Held:
    """A tensor as a call took it, or left it if it wrote to it; it may be gone or changed since."""

    __slots__ = (
        "dtype", "is_floating", "is_written", "layout", "reference", "requires_grad", "version"
    )  # fmt: skip

    def __init__(self, tensor: Tensor, written: Container[int]) -> None:
        self.is_floating, self.requires_grad = is_floating(tensor), tensor.requires_grad
        self.dtype, self.is_written = tensor.dtype, False
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


class Chain:
    """The calls that led to a failed one, which is the last.

    ``is_whole``: nothing before them was rounded, as far as known.
    """

    def __init__(self, failed: CallRecord, records: Sequence[CallRecord]) -> None:
        self._makers = {cell: record for record in records for cell in record.results}
        self.replaced: dict[int, Tensor] = {}  # ids of given values -> others
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
            maker = self._makers.get(given.cells[0]) if len(given.cells) == 1 else None
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
            is_last = record is self.calls[-1]
            inputs = [each.detach() for each in self._inputs(record, made)]
            if call_is_cast := record.call.op in CONVERTING and record in exact:
                results = [_up(inputs[-1], dtype)]
            else:
                dtypes = [each.dtype for each in inputs if casts_gradients]
                given = _cast(record.call, inputs, dtype if record in exact else None)
                last = gradients if is_last else None
                results = outcome(record.call, _arguments(record), given, last, dtypes)
            if is_last:
                return bits_in(results), inputs
            if not call_is_cast and record not in exact:
                results = _as_written(record, inputs, results)
            made |= {id(cell): each for cell, each in zip(record.results, results, strict=True)}
        raise AssertionError("a chain has a last call")

    def given(self) -> list[Tensor]:
        """Returns values that no call of the chain made."""
        return [e for of in self._sources.values() for e in of if isinstance(e, Tensor)]

    def gradients(self, exact: Collection[CallRecord], *, upcasts: bool = False) -> list[Tensor]:
        """Returns gradients of the last call's result for leaves, with ``exact`` in float32, perhaps leaves, too."""
        made: dict[int, Tensor] = {}
        leaves: dict[Leaf, Tensor] = {}
        with torch.enable_grad(), saved_tensors_hooks(lambda each: each, lambda each: each):
            for record in self.calls:
                for given, source in zip(record.inputs, self._sources[id(record)], strict=True):
                    if isinstance(leaf := given.cells[0], Leaf) and isinstance(source, Tensor):
                        given_leaf = upcast(source) if upcasts else source
                        leaves.setdefault(leaf, given_leaf.detach().requires_grad_())
                inputs = [
                    leaves.get(given.cells[0], each)  # type: ignore[call-overload]
                    for given, each in zip(record.inputs, self._inputs(record, made), strict=True)
                ]
                following = iter(
                    _cast(record.call, inputs, torch.float32 if record in exact else None)
                )

                def replace(tensor: Tensor, of: Iterator[Tensor] = following) -> Tensor:
                    return next(of).clone() if is_floating(tensor) else tensor

                arguments = _arguments(record).replaced(replace)
                results = floating_in([record.call.function(*arguments.args, **arguments.kwargs)])
                if record not in exact:
                    results = _as_written(record, inputs, results)
                made |= {id(cell): each for cell, each in zip(record.results, results, strict=True)}
            return list(
                torch.autograd.grad(results[0].sum(), [*leaves.values()], materialize_grads=True)
            )

    def _inputs(self, record: CallRecord, made: Mapping[int, Tensor]) -> list[Tensor]:
        inputs = []
        for each, source in zip(_held(record), self._sources[id(record)], strict=True):
            tensor = (
                made[source] if isinstance(source, int) else self.replaced.get(id(source), source)
            )
            if (tensor.shape, tensor.stride(), tensor.storage_offset()) != each.layout:
                tensor = tensor.as_strided(*each.layout)
            inputs.append(tensor)
        return inputs

    def maker_of(self, number: int) -> CallRecord | None:
        """Returns the call that made an input of the failed one, before conversions."""
        record: CallRecord | None = self.calls[-1]
        while record is not None:
            cells = record.inputs[number].cells
            record = self._makers.get(cells[0]) if len(cells) == 1 else None
            if record is None or record.call.op not in CONVERTING:
                break
            number = -1
        return record


def _arguments(record: CallRecord) -> Arguments:
    args, kwargs = record.given
    return Arguments(_filled(args), {name: _filled(each) for name, each in kwargs.items()})


def _as_written(record: CallRecord, inputs: list[Tensor], results: list[Tensor]) -> list[Tensor]:
    """Returns results in the dtype of the tensor that the call wrote to, if that is low."""
    written = zip(inputs, _held(record), strict=True)
    target = next((each.dtype for each, held in written if held.is_written), None)
    return [CAST[target](each) for each in results] if target in LOW_DTYPES else results


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
        chain = Chain(failed, records)
        if not chain.is_known:
            return _stopped(failed, trial, chain)
        low = [each for each in chain.calls if _can_change(each)]
        dtype = torch.float32 if low else torch.float64
        bits, exact_inputs = chain.run(chain.calls, gradients, dtype)
        if bits and not chain.run(chain.calls, gradients, dtype, casts_gradients=False)[0]:
            return Trial(0, is_cast=True)
        if bits or (not low and not chain.run([failed], gradients, dtype)[0]):
            trial = _placed(chain, trial, gradients)
            stopped = trial if chain.is_whole else _stopped(failed, trial, chain)
            return stopped and stopped._replace(is_tried=len(chain.calls) > 1)
        candidates = None if low else [chain.calls[n:] for n in reversed(range(len(chain.calls)))]

        def is_enough(exact: Sequence[CallRecord]) -> bool:
            return not chain.run(exact, gradients, dtype)[0]

        enough = fewest(low, is_enough, candidates) or chain.calls
        inputs = chain.run([], gradients)[1]
        is_zero = [((a == 0) & (b != 0)).any() for a, b in zip(inputs, exact_inputs, strict=True)]
        found = Trial(0, is_underflow=any(map(bool, is_zero)), is_known=not chain.has_stand_ins)
        return found._replace(causes=tuple(map(_cause, enough)), is_double=not low)
    return None if trial is None else trial._replace(is_known=False)


def fewest(
    low: Sequence[CallRecord],
    is_enough: Callable[[Sequence[CallRecord]], bool],
    candidates: Sequence[Sequence[CallRecord]] | None = None,
) -> Sequence[CallRecord]:
    """Returns the fewest calls that are enough in float32, as far as tried; () if all are not.

    By default the ``candidates`` are the calls of each place, the last first, then those of each op, as in lists.
    """
    if candidates is None:
        places: dict[object, list[CallRecord]] = {}
        ops: dict[object, list[CallRecord]] = {}
        for each in reversed(low):
            call = each.call
            places.setdefault((call.op, call.module, call.location), []).insert(0, each)
            ops.setdefault(call.op, []).insert(0, each)
        candidates = [*itertools.islice(places.values(), _MOST_ALONE), *ops.values(), low]
    enough = next(filter(is_enough, candidates), ())
    for op in dict.fromkeys([each.call.op for each in reversed(enough)]):
        fewer = [each for each in enough if each.call.op != op]
        if fewer and is_enough(fewer):
            enough = fewer
    for each in enough if 1 < len(enough) <= _MOST_PRUNED else ():
        fewer = [other for other in enough if other is not each]
        if is_enough(fewer):
            enough = fewer
    return enough


def _cause(record: CallRecord) -> OpCall:
    """Returns a call; if it writes to a low-precision tensor, which keeps its dtype, with that decision."""
    is_target = any(each.is_written and each.dtype in LOW_DTYPES for each in _held(record))
    is_target = is_target or record.writes
    return dataclasses.replace(record.call, cast_policy="TARGET") if is_target else record.call


def _placed(chain: Chain, trial: Trial | None, gradients: Gradients | None) -> Trial | None:
    """Returns the trial of a call that fails in float32, with the values where it does, and the call that made a zero."""
    failed = chain.calls[-1]
    inputs = chain.run([], gradients)[1]
    dtypes = [each.dtype for each in inputs]
    given = _cast(failed.call, inputs, None)
    results = outcome(failed.call, _arguments(failed), given, gradients, dtypes)
    bad = next((each for each in results if bits_in([each])), None)
    if bad is None:
        return trial
    found = trial or Trial(bits_in([bad]))
    values = values_at(failed.call, _arguments(failed), given, gradients, bad)
    zeros = [number for number, value in enumerate(values) if value == 0]
    maker = chain.maker_of(zeros[-1]) if zeros else None
    where = found.where or text_of(values)
    if maker is not None:
        where += f"; input {zeros[-1]} was made by {maker.call.op} in {located(maker.own_location)}"
    return found._replace(where=where)


def _stopped(failed: CallRecord, trial: Trial | None, chain: Chain) -> Trial | None:
    """Returns a trial whose earlier calls could not be repeated."""
    if trial is None and not is_low_call(failed.call):
        trial = Trial(NAN)  # it ran in float32
    return trial and trial._replace(is_known=False, stopped_at=chain.stopped_at)


def _can_change(record: CallRecord) -> bool:
    return is_low_call(record.call) and record.call.cast_policy != "FP32"
