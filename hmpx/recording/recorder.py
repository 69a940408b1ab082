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
from ..tensors import Args, node_of, tensors_in
from ..torch_internals import is_jit_tracing, is_noted_in_graph
from .entries import OWN_CAST, Counted, Counts, Entry, Thread
from .folding import Folded
from .signatures import Shape, shapes, signature
from .traces import Traces

_CONVERTING: Final = ops.facts("converting").keys()

#: How many entries a thread keeps, and how many threads have counts of their own, before what they
#: counted is folded. An entry takes some 5 kB.
_MOST_ENTRIES: Final = 2_000
_MOST_THREADS: Final = 64


class _Here(threading.local):
    """What is a thread's own.

    Attributes:
        counts: Its counts, once it has any.
        thread: What ends with it.
    """

    counts: Counts | None = None

    def __init__(self) -> None:
        self.thread = Thread()


class Recorder:
    """Counts calls that are alike.

    Each thread has counts of its own, so that none is lost. What it keeps does not grow with calls, nor
    with the variety of their shapes: see `Folded`.
    """

    def __init__(self, *, is_timed: bool = False) -> None:
        """Starts empty."""
        self._is_timed = is_timed
        self.is_on = True
        self.forget()

    def forget(self) -> None:
        """Drops all calls. Makes a new lock, since a thread of the parent may hold the old one after a fork."""
        self._here = _Here()
        self._lock = threading.RLock()
        self._counts: list[Counts] = []
        self._folded = Folded()
        self.traces = Traces()

    def __call__(
        self,
        call: OpCall,
        inputs: list[Tensor],
        args: Args,
        kwargs: Mapping[str, Any],
        result: Any,
        /,
    ) -> None:
        """Counts one call; none that becomes part of a graph, where it says nothing of the program."""
        if torch.compiler.is_compiling() or is_noted_in_graph() or is_jit_tracing():
            return
        if call.op in _CONVERTING:
            if call.output_dtypes == call.input_dtypes[:1]:
                return  # it has converted nothing
            call = replace(call, reason=OWN_CAST, cast_bytes=_bytes_of(result))
        learns = torch.is_grad_enabled()
        found = signature(args, kwargs, learns=learns)
        given, outputs = shapes(inputs, learns=learns), shapes(result)
        if any([shape.times > 1 for shape in given]) and call.reason != OWN_CAST:  # noqa: C419
            call = replace(call, cast_bytes=_bytes_cast(given, call))
        key = (
            call.site, call.cast_policy, call.reason, call.dtype, call.input_dtypes,
            call.cast_dtypes, call.device_type, call.module, call.location, call.phase,
            call.legalized, found, given, outputs,
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
        if len(counts.entries) > _MOST_ENTRIES:
            self._fold([counts])

    def note_backward(self, entry: Entry) -> None:
        """Counts that gradients of one of the entry's calls are computed."""
        counts = self._counts_here()
        known = counts.backward.get(id(entry))
        if known is None:
            known = counts.backward[id(entry)] = [entry, 0]
        known[1] += 1
        if len(counts.backward) > _MOST_ENTRIES:
            self._fold([counts])

    def counted(self) -> Counted:
        """Returns what all threads have counted."""
        with self._lock:
            entries = [entry for each in self._counts for entry in list(each.entries.values())]
            gradients = [
                (entry, times)
                for each in self._counts
                for entry, times in list(each.backward.values())
            ]
            return Counted(entries, gradients, self._folded.rows, self._folded.places)

    def _fold(self, counts: list[Counts]) -> None:
        """Folds what was counted by this thread, or by threads that have ended."""
        with self._lock:
            entries = [entry for each in counts for entry in each.entries.values()]
            gradients = [
                (entry, times) for each in counts for entry, times in each.backward.values()
            ]
            self._folded.add(entries, gradients, is_timed=self._is_timed)
            for each in counts:
                each.entries, each.backward = {}, {}

    def _counts_here(self) -> Counts:
        counts = self._here.counts
        if counts is None:
            counts = self._here.counts = Counts(self._here.thread)
            with self._lock:
                if len(self._counts) >= _MOST_THREADS:
                    ended = [each for each in self._counts if each.thread() is None]
                    self._fold(ended)
                    self._counts = [each for each in self._counts if each not in ended]
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


def _bytes_cast(inputs: tuple[Shape, ...], call: OpCall) -> int:
    """Returns the bytes that casts of a call wrote; under `torch.func.vmap`, for all at a time."""
    return sum(
        shape.bytes // given.itemsize * cast.itemsize
        for shape, given, cast in zip(inputs, call.input_dtypes, call.cast_dtypes, strict=True)
        if given is not cast
    )


def _bytes_of(result: Any) -> int:
    return sum(each.bytes for each in shapes(result))


def _node_of(inputs: list[Tensor], result: Any) -> Any:
    """Returns the node of autograd's graph that a call has made; None if it made none."""
    for output in [result] if isinstance(result, Tensor) else tensors_in([result]):
        node = node_of(output)
        if node is not None:
            return None if node in map(node_of, inputs) else node
    return None
