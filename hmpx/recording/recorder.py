"""The observer behind `record`: counts equal calls, and their backward."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from .. import ops
from ..observers import OpCall
from ..reports import Row, Waste, add_up, added, added_waste
from ..tensors import Args, node_of, tensors_in
from ..torch_internals import is_jit_tracing, is_noted_in_graph
from .casts import Casts
from .rows import OWN_CAST, backward_row, forward_row
from .signatures import Shape, Signature, shapes, signature

_T = TypeVar("_T")

_CONVERTING: Final = ops.facts("converting").keys()

#: Most entries before their counts are folded. An entry takes some 5 kB.
_MOST_ENTRIES: Final = 2_000


@dataclass(slots=True)
class Entry:
    """Equal calls: the first of them, their shapes, and their number.

    ``backward`` is the number of times that gradients of calls were computed.
    """

    call: OpCall
    signature: Signature | None
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    calls: int = 0
    seconds: float = 0.0
    backward: int = 0


class Recorder:
    """Counts equal calls.

    Each shape of inputs has its own entry, and a model that generates text has new shapes at each token. So
    once there are many entries, they are folded: only their sums are kept.
    """

    def __init__(self, *, is_timed: bool = False) -> None:
        """Starts empty."""
        self._is_timed = is_timed
        self.is_on = True
        self._entries: dict[object, Entry] = {}
        self._gradients: dict[int, Entry] = {}
        self.forget()

    def forget(self) -> None:
        """Drops all calls. Makes a new lock, since a thread of the parent may hold the old one after a fork."""
        for entry in [*self._entries.values(), *self._gradients.values()]:
            entry.backward = 0  # gradients may be computed later
        self._lock = threading.RLock()
        self._entries = {}
        self._gradients = {}  # those with gradients computed, in order
        self._sums: dict[Row, Row] = {}
        self._casts = Casts()

    def stop(self) -> None:
        """Ends the counting of backwards."""
        self.is_on = False

    # --- calls -----------------------------------------------------------------------------------

    def __call__(
        self,
        call: OpCall,
        inputs: list[Tensor],
        args: Args,
        kwargs: Mapping[str, Any],
        result: Any,
        /,
    ) -> None:
        """Counts one call, unless it becomes part of a graph and says nothing about the program."""
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
        node = _node_of(inputs, result) if learns else None
        with self._lock:
            try:
                entry = self._entries.get(key)
            except TypeError:  # sizes are symbols: a graph is being traced, and nothing computed
                return
            if entry is None:
                entry = self._entries[key] = Entry(call, found, given, outputs)
            entry.calls += 1
            entry.seconds += call.seconds or 0.0
            self._casts.note(entry.call, given, inputs, result, node)
        if node is not None:
            node.register_prehook(_Backward(self, entry))
        if len(self._entries) > _MOST_ENTRIES:
            self._fold()

    def note_backward(self, entry: Entry) -> None:
        """Counts a computation of gradients of one of the entry's calls."""
        with self._lock:
            entry.backward += 1
            self._gradients[id(entry)] = entry
        if len(self._gradients) > _MOST_ENTRIES:
            self._fold()

    def _fold(self) -> None:
        """Adds the entries to the sums; from now on only graphs hold them."""
        with self._lock:
            forward, backward = (
                [replace(entry) for entry in entries.values()]
                for entries in (self._entries, self._gradients)
            )
            for entry in (*self._entries.values(), *self._gradients.values()):
                entry.backward = 0
            self._entries, self._gradients = {}, {}

        def rows() -> list[Row]:
            calls = [forward_row(entry, is_timed=self._is_timed) for entry in forward]
            return [*calls, *map(backward_row, backward)]

        found = _in_own_thread(rows)
        with self._lock:
            add_up(self._sums, found)

    # --- results -------------------------------------------------------------------------------------

    def rows(self) -> tuple[Row, ...]:
        """Returns the counts, the most expensive first."""
        self._fold()
        with self._lock:
            return added(self._sums.values())

    def waste(self) -> tuple[Waste, ...]:
        """Returns unnecessary casts."""
        with self._lock:
            return added_waste(self._casts.waste())


class _Backward:
    """A hook that counts the backward of one call."""

    __slots__ = ("_entry", "_recorder")

    def __init__(self, recorder: Recorder, entry: Entry) -> None:
        self._recorder, self._entry = recorder, entry

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        if self._recorder.is_on:
            self._recorder.note_backward(self._entry)


def _in_own_thread(function: Callable[[], _T]) -> _T:
    """Runs ``function`` in its own thread and returns its result.

    torch's state is the default there, so none of the program's modes, such as inference mode, transforms or
    hooks for saved tensors, sees or changes the computation.
    """
    with ThreadPoolExecutor(1, "hmpx-report") as pool:
        try:
            running = pool.submit(function)
        except RuntimeError:  # no thread can start while the interpreter shuts down
            return function()
        return running.result()


def _bytes_cast(inputs: tuple[Shape, ...], call: OpCall) -> int:
    """Returns the bytes that a call's casts wrote; under `torch.func.vmap`, for the whole batch."""
    return sum(
        shape.bytes // given.itemsize * cast.itemsize
        for shape, given, cast in zip(inputs, call.input_dtypes, call.cast_dtypes, strict=True)
        if given is not cast
    )


def _bytes_of(result: Any) -> int:
    return sum(each.bytes for each in shapes(result))


def _node_of(inputs: list[Tensor], result: Any) -> Any:
    """Returns the node of autograd's graph that a call made, or None."""
    for output in [result] if isinstance(result, Tensor) else tensors_in([result]):
        node = node_of(output)
        if node is not None:
            return None if node in map(node_of, inputs) else node
    return None
