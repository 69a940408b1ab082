"""The observer behind `record`: counts calls that are alike, and their backward."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from .. import ops
from ..observers import OpCall
from ..tensors import Args, tensors_in
from .signatures import Shape, Signature, shapes, signature
from .traces import Traces

_CONVERTING: Final = ops.facts("converting").keys()

#: The reason of a conversion that the program itself has asked for.
OWN_CAST: Final = "the program's own cast"


class Entry:
    """Calls that are alike.

    Attributes:
        call: The first of them.
        signature: Their arguments; None if these have none.
        inputs: Shapes of the floating inputs.
        outputs: Shapes of the results.
        calls: How many.
        seconds: How long they took together.
        recorded: How many were recorded by autograd, and how many times
        backward: their gradients have been computed.
    """

    __slots__ = (
        "backward", "call", "calls", "inputs", "outputs", "recorded", "seconds", "signature"
    )  # fmt: skip

    def __init__(
        self,
        call: OpCall,
        found: Signature | None,
        inputs: tuple[Shape, ...],
        outputs: tuple[Shape, ...],
    ) -> None:
        """Starts with no call."""
        self.call, self.signature, self.inputs, self.outputs = call, found, inputs, outputs
        self.calls = self.recorded = self.backward = 0
        self.seconds = 0.0


class Counts:
    """What one thread has counted.

    Attributes:
        entries: Key of a call -> calls that are alike.
        backward: ``id`` of an entry -> the entry, and how often gradients of its calls were computed.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self.entries: dict[object, Entry] = {}
        self.backward: dict[int, list[Any]] = {}


class _Here(threading.local):
    """What is a thread's own.

    Attributes:
        counts: Its counts, once it has any.
    """

    counts: Counts | None = None


class Recorder:
    """Counts calls that are alike.

    Each thread has counts of its own, so that none is lost.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self._here = _Here()
        self._lock = threading.Lock()
        self._counts: list[Counts] = []
        self.traces = Traces()
        self.is_on = True

    def __call__(
        self,
        call: OpCall,
        inputs: list[Tensor],
        args: Args,
        kwargs: Mapping[str, Any],
        result: Any,
        /,
    ) -> None:
        """Counts one call."""
        if call.op in _CONVERTING:
            if call.output_dtypes == call.input_dtypes[:1]:
                return  # it has converted nothing
            call = replace(call, reason=OWN_CAST, cast_bytes=_bytes_of(result))
        learns = torch.is_grad_enabled()
        found = signature(args, kwargs, learns=learns)
        given, outputs = shapes(inputs, learns=learns), shapes(result)
        key = (
            call.site, call.cast_policy, call.reason, call.dtype, call.input_dtypes,
            call.cast_dtypes, call.device_type, call.module, call.location, call.phase,
            found, given, outputs,
        )  # fmt: skip
        counts = self._counts_here()
        try:
            entry = counts.entries.get(key)
        except TypeError:  # sizes are symbols: a graph is being made, and nothing computed
            return
        if entry is None:
            entry = counts.entries[key] = Entry(call, found, given, outputs)
        entry.calls += 1
        if call.seconds is not None:
            entry.seconds += call.seconds
        node = _node_of(inputs, result) if learns else None
        if node is not None:
            entry.recorded += 1
            node.register_prehook(_Backward(self, entry))
        self.traces.note(entry, inputs, result, node)

    def note_backward(self, entry: Entry) -> None:
        """Counts that gradients of one of the entry's calls are computed."""
        counts = self._counts_here()
        known = counts.backward.get(id(entry))
        if known is None:
            known = counts.backward[id(entry)] = [entry, 0]
        known[1] += 1

    def entries(self) -> list[Entry]:
        """Returns all entries, of all threads, with what their backward has come to."""
        with self._lock:
            counts = list(self._counts)
        found = [entry for each in counts for entry in list(each.entries.values())]
        for entry in found:
            entry.backward = 0
        for each in counts:
            for entry, count in list(each.backward.values()):
                entry.backward += count
        return found

    def _counts_here(self) -> Counts:
        counts = self._here.counts
        if counts is None:
            counts = self._here.counts = Counts()
            with self._lock:
                self._counts.append(counts)
        return counts


class _Backward:
    """A hook that counts the backward of one call."""

    __slots__ = ("_entry", "_recorder")

    def __init__(self, recorder: Recorder, entry: Entry) -> None:
        self._recorder, self._entry = recorder, entry

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        if self._recorder.is_on:
            self._recorder.note_backward(self._entry)


def _bytes_of(result: Any) -> int:
    return sum(each.bytes for each in shapes(result))


def _node_of(inputs: list[Tensor], result: Any) -> Any:
    """Returns the node of autograd's graph that a call has made; None if it made none."""
    for output in [result] if isinstance(result, Tensor) else tensors_in([result]):
        node = output.grad_fn
        if node is not None:
            return None if any([node is each.grad_fn for each in inputs]) else node  # noqa: C419
    return None
