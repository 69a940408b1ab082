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
from ..observers import OpCall, Values
from ..reports import Row, Waste, add_up, added, added_waste
from ..tensors import LOW_DTYPES, floating_in, node_of, promoted, tensors_in
from ..torch_internals import DispatchMode, disable_modes, is_jit_tracing, is_noted_in_graph
from ..torch_state import without_casts
from .casts import Casts
from .signatures import Shape, Signature, rebuilt, shapes, shapes_in, signature

if TYPE_CHECKING:
    from typing_extensions import Unpack

_CONVERTING: Final = ops.facts("converting").keys()

#: Most entries before their counts are folded. An entry takes some 5 kB.
_MOST_ENTRIES: Final = 2_000


@dataclass(slots=True)
class RecordedCalls:
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
        self._entries: dict[object, RecordedCalls] = {}
        self._gradients: dict[int, RecordedCalls] = {}
        self._lock = new_lock()
        self.forget()

    def forget(self) -> None:
        """Drops all calls."""
        for entry in [*self._entries.values(), *self._gradients.values()]:
            entry.backward = 0  # gradients may be computed later
        self._entries = {}
        self._gradients = {}  # those with gradients computed, in order
        self._sums: dict[Row, Row] = {}
        self._casts = Casts()

    def stop(self) -> None:
        """Ends the counting of backwards."""
        self.is_on = False

    # --- calls -----------------------------------------------------------------------------------

    def __call__(self, call: OpCall, /, *values: Unpack[Values]) -> None:
        """Counts one call, unless it becomes part of a graph and says nothing about the program."""
        inputs, args, kwargs, result = values
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
                entry = self._entries[key] = RecordedCalls(call, found, given, outputs)
            entry.calls += 1
            entry.seconds += call.seconds or 0.0
            self._casts.note(entry.call, given, inputs, result, node)
        if node is not None:
            node.register_prehook(functools.partial(self._note_backward, entry))
        if len(self._entries) > _MOST_ENTRIES:
            self._fold()

    def _note_backward(self, entry: RecordedCalls, _: Any) -> None:
        """A hook that counts a computation of gradients of one of the entry's calls."""
        if not self.is_on:
            return
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

        try:
            found = in_own_thread(rows, "hmpx-report")
        except raised_here(RuntimeError):  # no thread can start while the interpreter shuts down
            found = rows()
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


# --- rows of reports --------------------------------------------------------------------------------

#: The reason of a conversion in the program itself.
OWN_CAST: Final = "the program's own cast"


def forward_row(entry: RecordedCalls, *, is_timed: bool) -> Row:
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


def backward_row(entry: RecordedCalls) -> Row:
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


def _row(entry: RecordedCalls, **values: Any) -> Row:
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
    return is_mixed and call.op in ops.facts("promotes")


def _computed_in(call: OpCall) -> str:
    if is_format(call.dtype):
        return call.dtype.name
    dtype = call.output_dtypes[0] if call.reason == OWN_CAST else call.dtype
    if dtype is None:  # it was left alone: it computes in its inputs' dtype
        real = [each for each in call.cast_dtypes if each.is_floating_point] or call.cast_dtypes
        dtype = promoted(real)
    assert isinstance(dtype, torch.dtype)
    return _name(dtype)


def _input_bytes(entry: RecordedCalls) -> int:
    """Returns the bytes of all inputs, the floating ones as cast."""
    given = _bytes(entry.inputs if entry.signature is None else shapes_in(entry.signature))
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


def _flops(entry: RecordedCalls) -> Flops:
    """Returns the operations of one call; under `torch.func.vmap`, of the whole batch."""
    if entry.signature is None:
        return Flops()
    found = _flops_of(entry.call.function, entry.signature)
    times = max([shape.times for shape in entry.outputs], default=1)
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
