"""The observer behind `record`: counts equal calls, and their backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..errors import raised_here
from ..forks import in_own_thread, new_lock
from ..number_formats import is_format
from ..observers import OpCall, Values, spared
from ..reports import Row, Waste, add_up, added_waste, by_cost
from ..tensors import LOW_DTYPES, floating_in, long_name, node_of, promoted, tensors_in
from ..torch_internals import DispatchMode, disable_modes, is_jit_tracing, is_noted_in_graph
from ..torch_state import without_casts
from .casts import CallCasts, Casts
from .signatures import Shape, Signature, rebuilt, shapes, shapes_in, signature

if TYPE_CHECKING:
    from typing_extensions import Unpack

_CONVERTING: Final = ops.facts("converting").keys()

#: Most entries before their counts are folded, beyond twice the number of rows.
_MOST_ENTRIES: Final = 2_000


@dataclass(slots=True, eq=False)
class Costs:
    """What equal calls cost, wherever they are made: the first of them, and its shapes."""

    call: OpCall
    signature: Signature | None
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    casts: CallCasts
    rows: tuple[Row, Row] | None = None  # of one call, and of its gradients


@dataclass(slots=True, eq=False)
class RecordedCalls:
    """Equal calls of one place: the first of them, and their number.

    ``backward`` is the number of times that gradients of calls were computed.
    """

    call: OpCall
    costs: Costs
    calls: int = 0
    seconds: float = 0.0
    backward: int = 0
    note_backward: Callable[[Any], None] | None = None  # the hook of nodes


class Recorder:
    """Counts equal calls.

    Each shape of inputs has its own entry, and a model that generates text has new shapes at each token. So
    once there are many more entries than rows, they are folded: only their sums are kept.
    """

    def __init__(self, *, is_timed: bool = False) -> None:
        self._is_timed = is_timed
        self.is_on = True  # backwards are counted
        self._entries: dict[object, RecordedCalls] = {}
        self._gradients: dict[int, RecordedCalls] = {}
        self._lock = new_lock()
        self.forget()

    def forget(self) -> None:
        """Drops all calls."""
        for entry in [*self._entries.values(), *self._gradients.values()]:
            entry.backward = 0  # gradients may be computed later
        self._gradients = {}  # those with gradients computed, in order
        self._sums: dict[Row, Row] = {}
        self._casts = Casts()
        self._forget_entries()

    def _forget_entries(self) -> None:
        # A deep model has many rows, and as many entries.
        self._most = _MOST_ENTRIES + 2 * len(self._sums)
        self._entries = {}
        self._costs: dict[object, Costs] = {}
        self._known: dict[int, RecordedCalls] = {}  # by the ids of calls
        self._held = list[OpCall]()  # these calls, so that their ids are not reused

    # --- calls -----------------------------------------------------------------------------------

    @spared
    def __call__(self, call: OpCall, /, *values: Unpack[Values]) -> None:
        """Counts one call, unless it becomes part of a graph and says nothing about the program."""
        inputs, _, _, result = values
        if torch.compiler.is_compiling() or is_noted_in_graph() or is_jit_tracing():
            return
        learns = torch.is_grad_enabled()
        node = _node_of(inputs, result) if learns else None
        with self._lock:
            entry = self._known.get(id(call)) or self._entry_of(call, values, learns=learns)
            if entry is None:
                return
            entry.calls += 1
            if call.seconds is not None:
                entry.seconds += call.seconds
            self._casts.note(entry.call, entry.costs.casts, inputs, result, node)
        if node is not None:
            node.register_prehook(entry.note_backward)
        if len(self._entries) > self._most:
            self._fold()

    def _entry_of(self, call: OpCall, values: Values, *, learns: bool) -> RecordedCalls | None:
        """Returns the entry of a call that is not known; None for a call to leave out."""
        inputs, args, kwargs, result = values
        first = call
        if call.op in _CONVERTING:
            if call.output_dtypes == call.input_dtypes[:1]:
                return None  # it has converted nothing
            call = replace(call, reason=OWN_CAST, cast_bytes=_bytes(shapes(result)))
        found = signature(args, kwargs, learns=learns)
        given, outputs = shapes(inputs, learns=learns), shapes(result)
        if any([shape.times > 1 for shape in given]) and call.reason != OWN_CAST:  # noqa: C419
            call = replace(call, cast_bytes=_bytes_cast(given, call))
        key = (
            call.site, call.cast_policy, call.reason, call.dtype, call.input_dtypes,
            call.cast_dtypes, call.device_type, call.legalized, found, given, outputs,
            *map(type, inputs),
        )  # fmt: skip
        try:
            costs = self._costs.get(key)
        except TypeError:  # sizes are symbols: a graph is being traced, and nothing computed
            return None
        if costs is None:
            costs = Costs(call, found, given, outputs, CallCasts(call, given))
            self._costs[key] = costs
        here = costs, call.module, call.location, call.phase
        entry = self._entries.get(here)
        if entry is None:
            entry = self._entries[here] = RecordedCalls(call, costs)
            entry.note_backward = functools.partial(self._note_backward, entry)
        if call.seconds is None:
            if len(self._known) > self._most:
                self._known, self._held = {}, []
            self._known[id(first)] = entry
            self._held.append(first)
        return entry

    def _note_backward(self, entry: RecordedCalls, _: Any) -> None:
        """A hook that counts a computation of gradients of one of the entry's calls."""
        if not self.is_on:
            return
        with self._lock:
            entry.backward += 1
            if entry.backward > 1:
                return
            self._gradients[id(entry)] = entry
        if len(self._gradients) > self._most:
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
            self._gradients = {}
            self._forget_entries()

        def rows() -> list[Row]:
            calls = [
                _times(
                    _rows(each.costs)[0], each.call, each.calls, phase=each.call.phase,
                    seconds=each.seconds if self._is_timed else None,
                )
                for each in forward
            ]  # fmt: skip
            gradients = [
                _times(_rows(each.costs)[1], each.call, each.backward) for each in backward
            ]
            return [*calls, *gradients]

        try:
            found = in_own_thread(rows, "hmpx-report")
        except raised_here(RuntimeError):  # no thread can start while the interpreter shuts down
            found = rows()
        with self._lock:
            add_up(self._sums, found)
            self._most = _MOST_ENTRIES + 2 * len(self._sums)

    # --- results -------------------------------------------------------------------------------------

    def rows(self) -> tuple[Row, ...]:
        """Returns the counts, the most expensive first."""
        self._fold()
        with self._lock:
            return by_cost(self._sums.values())

    def waste(self) -> tuple[Waste, ...]:
        """Returns unnecessary casts."""
        with self._lock:
            return added_waste(self._casts.waste())


def _bytes_cast(inputs: tuple[Shape, ...], call: OpCall) -> int:
    """Returns the bytes that a call's casts wrote; under `torch.func.vmap`, for the whole batch."""
    return sum(
        shape.bytes // given.itemsize * cast.itemsize
        for shape, given, cast in zip(inputs, call.input_dtypes, call.cast_dtypes, strict=True)
        if given is not cast
    )


def _node_of(inputs: list[Tensor], result: Any) -> Any:
    """Returns the node of autograd's graph that a call made, or None."""
    for output in [result] if isinstance(result, Tensor) else tensors_in([result]):
        node = node_of(output)
        if node is not None:
            return None if any([output is each for each in inputs]) else node  # noqa: C419  # twice as fast
    return None


# --- rows of reports --------------------------------------------------------------------------------

#: The reason of a conversion in the program itself.
OWN_CAST: Final = "the program's own cast"


def _times(row: Row, call: OpCall, times: int, **values: Any) -> Row:
    names = "casts", "cast_bytes", "flops", "bytes"
    sums = {name: times * getattr(row, name) for name in names}
    return replace(row, module=call.module, location=call.location, calls=times, **sums, **values)


def _rows(costs: Costs) -> tuple[Row, Row]:
    if costs.rows is None:
        costs.rows = _row_of_call(costs), _row_of_gradients(costs)
    return costs.rows


def _row_of_call(costs: Costs) -> Row:
    call = costs.call
    return _row(
        call,
        phase=call.phase,
        input_dtypes=_names(call.input_dtypes),
        cast_dtypes=_names(call.cast_dtypes),
        output_dtypes=_names(call.output_dtypes),
        casts=_casts(call),
        cast_bytes=call.cast_bytes,
        flops=_flops(costs).forward,
        bytes=_input_bytes(costs) + _bytes(costs.outputs),
    )


def _row_of_gradients(costs: Costs) -> Row:
    """Returns a row with gradients of results as input, and of inputs as output, in their own dtypes."""
    call = costs.call
    inputs = list(zip(costs.inputs, call.input_dtypes, call.cast_dtypes, strict=True))
    if call.reason == OWN_CAST:
        inputs = [(shape, given, call.output_dtypes[0]) for shape, given, _ in inputs]
    learning = [each for each in inputs if each[0].learns]
    cast = [
        shape
        for shape, given, run in learning
        if given is not run
        # torch upcasts it inside the op, and so casts its gradient to its dtype
        or (
            (call.output_dtypes[:1] == (torch.float32,) and given in LOW_DTYPES)
            and call.op in ops.facts("promotes")
        )
    ]
    gradients = sum(shape.bytes // given.itemsize * run.itemsize for shape, given, run in learning)
    return _row(
        call,
        phase="backward",
        input_dtypes=_names(call.output_dtypes),
        cast_dtypes=_names(call.output_dtypes),
        output_dtypes=_names([given for _, given, _ in learning]),
        casts=len(cast),
        cast_bytes=_bytes(cast),
        flops=_flops(costs).backward,
        bytes=_bytes(costs.outputs) + _input_bytes(costs) + gradients,
    )


def _row(call: OpCall, **values: Any) -> Row:
    return Row(
        op=call.op,
        site=call.site,
        module=call.module,
        location=call.location,
        device_type=call.device_type or "",
        cast_policy=call.cast_policy,
        reason=call.reason,
        dtype=_computed_in(call),
        calls=1,
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


def _computed_in(call: OpCall) -> str:
    if is_format(call.dtype):
        return call.dtype.name
    dtype = call.output_dtypes[0] if call.reason == OWN_CAST else call.dtype
    if dtype is None:  # it was left alone: it computes in its inputs' dtype
        real = [each for each in call.cast_dtypes if each.is_floating_point] or call.cast_dtypes
        dtype = promoted(real)
    assert isinstance(dtype, torch.dtype)
    return long_name(dtype)


def _input_bytes(costs: Costs) -> int:
    """Returns the bytes of all inputs, the floating ones as cast."""
    given = _bytes(costs.inputs if costs.signature is None else shapes_in(costs.signature))
    for shape, run in zip(costs.inputs, costs.call.cast_dtypes, strict=True):
        given += shape.bytes // shape.dtype.itemsize * (run.itemsize - shape.dtype.itemsize)
    return given


def _bytes(shapes: Iterable[Shape]) -> int:
    return sum(shape.bytes for shape in shapes)


def _names(dtypes: Iterable[torch.dtype]) -> tuple[str, ...]:
    return tuple(map(long_name, dtypes))


# --- floating-point operations -------------------------------------------------------------------


class Flops(NamedTuple):
    """Floating-point operations of a call, and of its gradients."""

    forward: int = 0
    backward: int = 0


def _flops(costs: Costs) -> Flops:
    """Returns the operations of one call; under `torch.func.vmap`, of the whole batch."""
    if costs.signature is None:
        return Flops()
    found = _flops_of(costs.call.function, costs.signature)
    times = max([shape.times for shape in costs.outputs], default=1)
    return Flops(found.forward * times, found.backward * times)


class _FlopCounter(DispatchMode):
    """Counts by torch's formulas; torch's own counter would import torch.compile, which takes seconds."""

    supports_higher_order_operators = False
    total = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.utils.flop_counter import flop_registry  # slow to import

        kwargs = kwargs or {}
        formula = flop_registry.get(op._overloadpacket)
        if formula is None:
            with self:
                result = op.decompose(*args, **kwargs)
            return op(*args, **kwargs) if result is NotImplemented else result
        result = op(*args, **kwargs)
        self.total += formula(*args, **kwargs, out_val=result)
        return result


@functools.lru_cache(maxsize=10_000)
def _flops_of(function: Callable[..., Any], found: Signature) -> Flops:
    """Returns the operations of a call of torch's ``function``; zero if they depend on values.

    Repeats the call on tensors without memory. So legalized and emulated calls count as the program made them.
    """
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
            with _FlopCounter() as counter:
                result = function(*args, **kwargs)
            forward = counter.total
            learning = [tensor for tensor in made if tensor.requires_grad]
            results = [each for each in floating_in([result]) if each.requires_grad]
            if not (forward and learning and results):
                return Flops(forward)
            gradients = [torch.empty_like(each) for each in results]
            with _FlopCounter() as counter:
                torch.autograd.grad(results, learning, gradients, allow_unused=True)
            return Flops(forward, counter.total)
        except raised_here(RuntimeError, TypeError, ValueError):
            return Flops()  # its shapes depend on values, or it has no kernel without memory
