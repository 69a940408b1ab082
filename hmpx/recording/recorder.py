"""The observer behind `record`: counts calls that are alike, and their backward."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeVar

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

#: How many entries are kept before what they counted is folded. An entry takes some 5 kB.
_MOST_ENTRIES: Final = 2_000


@dataclass(slots=True)
class Entry:
    """Calls that are alike: the first of them, their shapes, and how many they are.

    ``recorded`` counts the calls that autograd recorded, ``backward`` how many times gradients of calls
    were computed.
    """

    call: OpCall
    signature: Signature | None
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    calls: int = 0
    seconds: float = 0.0
    recorded: int = 0
    backward: int = 0
    is_folded: bool = False

    def taken(self) -> Entry:
        """Returns a copy, and starts anew."""
        found = replace(self)
        self.calls, self.seconds, self.recorded, self.backward = 0, 0.0, 0, 0
        self.is_folded = True
        return found


class Place(NamedTuple):
    """Where results may be unused."""

    op: str
    module: str
    location: str


def _place_of(entry: Entry) -> Place:
    return Place(entry.call.op, entry.call.module, entry.call.location)


@dataclass(slots=True)
class _Unused:
    """Sums over folded calls at one place, which tell whether their results were used."""

    recorded: int = 0
    bytes: int = 0
    backward: int = 0


class Recorder:
    """Counts calls that are alike.

    Each shape of inputs is an entry of its own, and a model that writes text has others at each token.
    So once there are many, their sums are kept instead of them: entries are folded.
    """

    def __init__(self, *, is_timed: bool = False) -> None:
        """Starts empty."""
        self._is_timed = is_timed
        self.is_on = True
        self._entries: dict[object, Entry] = {}
        self.forget()

    def forget(self) -> None:
        """Drops all calls. Makes a new lock, since a thread of the parent may hold the old one after a fork."""
        for entry in list(self._entries.values()):
            entry.taken()  # their gradients may be computed later
        self._lock = threading.RLock()
        self._entries = {}
        self._late: dict[int, Entry] = {}  # folded ones, whose gradients were computed since
        self._sums: dict[Row, Row] = {}
        self._places: dict[Place, _Unused] = {}
        self._casts = Casts()

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
        node = _node_of(inputs, result) if learns else None
        with self._lock:
            try:
                entry = self._entries.get(key)
            except TypeError:  # sizes are symbols: a graph is being made, and nothing computed
                return
            if entry is None:
                entry = self._entries[key] = Entry(call, found, given, outputs)
            entry.calls += 1
            entry.seconds += call.seconds or 0.0
            entry.recorded += node is not None
            self._casts.note(entry.call, given, inputs, result, node)
        if node is not None:
            node.register_prehook(_Backward(self, entry))
        if len(self._entries) > _MOST_ENTRIES:
            self._fold()

    def note_backward(self, entry: Entry) -> None:
        """Counts that gradients of one of the entry's calls are computed."""
        with self._lock:
            entry.backward += 1
            if entry.is_folded:
                self._late[id(entry)] = entry
        if len(self._late) > _MOST_ENTRIES:
            self._fold()

    def _fold(self) -> None:
        with self._lock:
            taken = [each.taken() for each in (*self._entries.values(), *self._late.values())]
            self._entries, self._late = {}, {}
            for entry in taken:
                sums = self._places.setdefault(_place_of(entry), _Unused())
                sums.recorded += entry.recorded
                sums.bytes += entry.recorded * entry.call.cast_bytes
                sums.backward += entry.backward
        found = _in_own_thread(lambda: [*_rows(taken, is_timed=self._is_timed)])
        with self._lock:
            add_up(self._sums, found)

    # --- what was counted ------------------------------------------------------------------------

    def rows(self) -> tuple[Row, ...]:
        """Returns what was counted, those that cost most first."""
        with self._lock:
            counted = [replace(each) for each in (*self._entries.values(), *self._late.values())]
            sums = list(self._sums.values())
        return _in_own_thread(lambda: added([*sums, *_rows(counted, is_timed=self._is_timed)]))

    def waste(self) -> tuple[Waste, ...]:
        """Returns casts that could be done without."""
        with self._lock:
            return added_waste([*self._casts.waste(), *self._unused_results()])

    def _unused_results(self) -> Iterator[Waste]:
        """Yields calls that were recorded by autograd and got no gradient, where others did."""
        is_used = bool(self._late) or any(each.backward for each in self._entries.values())
        if not is_used and not any(each.backward for each in self._places.values()):
            return
        for entry in self._entries.values():
            if entry.call.cast_bytes and entry.recorded and not entry.backward:
                bytes_ = entry.recorded * entry.call.cast_bytes
                yield _unused(_place_of(entry), entry.recorded, bytes_)
        used = set(map(_place_of, self._late.values()))
        for place, unused in self._places.items():
            if unused.bytes and not unused.backward and place not in used:
                yield _unused(place, unused.recorded, unused.bytes)


class _Backward:
    """A hook that counts the backward of one call."""

    __slots__ = ("_entry", "_recorder")

    def __init__(self, recorder: Recorder, entry: Entry) -> None:
        self._recorder, self._entry = recorder, entry

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        if self._recorder.is_on:
            self._recorder.note_backward(self._entry)


def _rows(entries: Iterable[Entry], *, is_timed: bool) -> Iterator[Row]:
    """Yields the rows of calls, and then those of gradients."""
    for entry in entries:
        if entry.calls:
            yield forward_row(entry, is_timed=is_timed)
    for entry in entries:
        if entry.backward:
            yield backward_row(entry)


def _unused(place: Place, times: int, count: int) -> Waste:
    return Waste(
        "unused result",
        *place,
        times,
        count,
        "with torch.no_grad():",
        "no gradient came back to it, so nothing that was differentiated depends on it",
    )


def _in_own_thread(function: Callable[[], _T]) -> _T:
    """Returns what ``function`` returns, having run it in a thread of its own.

    Torch's state is the default there: none of the program's modes, such as inference mode, transforms
    or hooks for saved tensors, sees what is computed, or changes it.
    """
    with ThreadPoolExecutor(1, "hmpx-report") as pool:
        try:
            running = pool.submit(function)
        except RuntimeError:  # none can be started while the interpreter ends
            return function()
        return running.result()


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
