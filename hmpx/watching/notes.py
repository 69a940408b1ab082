"""Records each call of a watched program and its gradients.

Runs within the program, never waits for a device and records no gradients. On the CPU alone it keeps tensors alive:
the inputs of low-precision calls, until their backward has run, and small ones, until the end of the step.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from ..forks import new_lock
from ..observers import OpCall, Values, spared
from ..ops import facts
from ..places import own_line
from ..tensors import edges_of, is_captured, is_leaf, map_tensors, node_of, tensors_in, version_of
from ..torch_internals import running_node, unseen
from ..torch_state import named_tensors, spot
from .chains import MOST_CALLS, Held, traced_back
from .lost_gradients import lost_gradient
from .records import (
    CallRecord,
    Cell,
    GradientRecord,
    Input,
    KnownTensors,
    Leaf,
    Trial,
    alive,
    is_measurable,
    is_off_limits,
    storage_of,
)
from .slots import Extremes, Slots
from .trials import Arguments, can_change, has_gradient, kept, tried, tried_forward

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: Key of a node's metadata for the cells of its results.
_CELLS: Final = "hmpx.watched"

#: Likewise, for the name of the module that called a function.
_MODULE: Final = "hmpx.module"

#: Ops whose results are uninitialized memory.
_UNSET: Final = frozenset({"resize", "resize_as", "is_set_to"})

#: Ops that may return their argument.
_CONVERSIONS: Final = facts("converting").keys()

#: Ops by which programs look for non-finite gradients.
_CHECKS: Final = frozenset({"isfinite", "isinf", "isnan"})

#: Ops that are not finite where a metric counts nothing.
_RATIOS: Final = frozenset(
    {"truediv", "rtruediv", "div", "divide", "reciprocal", "mean", "var", "std"}
)

#: Most failures of one line that are traced back: a program may fail there on purpose.
_MOST_TRACED: Final = 10

#: More nodes than any op has: with more, inputs were not recognised.
_MOST_NODES: Final = 200

#: node -> its edges that leave a call.
_Exits = Mapping[Any, Sequence[int]]


class Notes:
    """The records of one step, in order."""

    def __init__(self) -> None:
        self.records: list[CallRecord | GradientRecord] = []
        self.step = 0
        self.is_open = True  # calls and gradients are recorded
        self.has_gradients = False
        self.trains = False  # there was a backward
        self.are_checked = False  # the program looks itself whether gradients are finite
        self.waits = False  # calls that fail on accelerators are tried at once, as on the CPU
        self._slots = Slots()
        self._known = KnownTensors()
        self._leaves: dict[int, Leaf] = {}
        self._owners: dict[int, Leaf] | None = None  # of gradients
        self._names: dict[int, tuple[weakref.ref[Tensor], str]] = {}  # of parameters
        self._traced: Counter[str] = Counter()
        self._has_lost = False  # in this step, all of a gradient in low precision
        self._carried: list[CallRecord] = []  # of earlier steps
        self._arriving: list[
            Cell
        ] = []  # of gradients, whose records may be added after the next `take`
        self._lock = new_lock()

    @property
    def is_full(self) -> bool:
        """Whether records should be taken before more are added."""
        return self._slots.is_full

    def take(self, *, ends_step: bool) -> list[CallRecord | GradientRecord]:
        """Returns the records with all measurements, and starts over; waits for devices.

        At the end of a step they are dropped if all values were finite.
        """
        with self._lock:
            records, self.records = self.records, []
            carried = self._behind_state(records) if ends_step else []
            extremes = self._slots.read(always=bool(carried) or self._has_lost)
            self._leaves, self._owners = {}, None
            are_finite = not self._has_lost and (
                extremes is None or all(math.isfinite(sum(each)) for each in extremes.values())
            )
            self._has_lost = False
            if ends_step:
                self.has_gradients, self._carried = False, carried
            arriving, self._arriving = self._arriving, []
            seen = carried if ends_step and are_finite else records
            for cell in itertools.chain(arriving, *[each.cells() for each in seen]):
                if cell.slot is not None:
                    cell.extremes = (0.0, 0.0) if extremes is None else extremes[cell.slot]
                    cell.slot = None
            # Values that are not finite, or that a program keeps, may be used in later steps.
            kept = {cell for record in carried for cell in record.results}
            self._known.forget(lambda cell: not ends_step or bool(cell.bits) or cell in kept)
            return [] if ends_step and are_finite else records

    def _behind_state(self, records: Sequence[CallRecord | GradientRecord]) -> list[CallRecord]:
        """Returns the calls that led to values that a program keeps without a graph, such as averages, the last first."""
        calls = [each for each in records if isinstance(each, CallRecord) and each.given]
        makers = {cell: each for each in (*self._carried, *calls) for cell in each.results}
        living = [makers.get(cell) for cell in self._known.living() if not cell.is_hooked]
        found = dict.fromkeys([each for each in living if each is not None])
        pending = list(found)
        while pending and len(found) < MOST_CALLS:
            for given in pending.pop().inputs:
                maker = makers.get(given.cells[0])
                if maker is not None and maker not in found:
                    found[maker] = None
                    pending.append(maker)
        return list(found)

    def is_named(self, record: CallRecord) -> bool:
        """Whether a call wrote to a parameter or buffer of a module, or to a parameter's gradient."""
        written = [each for reference, _ in record.alive if (each := alive(reference)) is not None]
        named = [each for reference, _ in self._names.values() if (each := reference()) is not None]
        gradients = {id(each.grad) for each in named if is_leaf(each)}
        return any(id(each) in gradients or self.name_of(each) for each in written)

    def living(self) -> Iterator[Cell]:
        """Yields the cells of memory that is in use."""
        return self._known.living()

    # --- calls -----------------------------------------------------------------------------------

    def add_call(self, call: OpCall, /, *values: Unpack[Values]) -> None:
        """Records a call after it ran."""
        if not self.is_open or is_off_limits():
            return
        inputs, args, kwargs, result = values
        written = args[0] if result is None else result
        if is_measurable(written):
            results = [written]
        else:
            results = [each for each in tensors_in([written]) if is_measurable(each)]
        self.are_checked |= self.has_gradients and call.op in _CHECKS
        if call.op in _CHECKS and not results and inputs and is_measurable(inputs[0]):
            with self._lock:
                record = CallRecord(call, self.step, "", call.module, is_check=True)
                record.inputs.append(self._input(record, inputs[0], storage_of(inputs[0])))
                self.records.append(record)
        is_same = call.op in _CONVERSIONS and any([result is each for each in inputs])  # noqa: C419
        if not results or is_same or is_captured(results[0]):
            return
        module = call.module
        if call.phase == "backward" and (node := running_node()) is not None:
            module = module or node.metadata.get(_MODULE, "")
        record = CallRecord(call, self.step, own_line(call.location), module)
        record.is_outside = spot()[0] is None
        is_ratio = record.is_outside and call.op in _RATIOS
        is_metric = is_ratio or results[0].numel() == 1
        record.is_metric = is_metric and node_of(results[0]) is None
        record.is_intended = call.op in _UNSET or _has_non_finite(args)
        if kwargs and not record.is_intended:
            record.is_intended = _has_non_finite(kwargs.values())
        with self._lock:
            self._measure(record, inputs, results)
            self.records.append(record)
        arguments = None
        if results[0].is_cpu or self.waits:
            written = {storage_of(each)._cdata for each in results}
            held = functools.partial(Held, written=written)
            names = kwargs.items() if kwargs else ()
            record.given = map_tensors(args, held), {n: map_tensors(v, held) for n, v in names}
        if not record.is_intended:
            arguments = kept(args, kwargs, inputs) if can_change(call) else None
            arguments = self._try(record, arguments, inputs, results)
        _hook_call(self, record, inputs, results, arguments)

    def _measure(self, record: CallRecord, inputs: list[Tensor], results: list[Tensor]) -> None:
        storages = [storage_of(each) for each in results]
        ours = [each._cdata for each in storages]
        for tensor in inputs:
            if not is_measurable(tensor):
                record.is_unsure = True
                continue
            storage = storage_of(tensor)
            if storage._cdata in ours:
                self._add_target(record, tensor, storage)
            else:
                record.inputs.append(self._input(record, tensor, storage))
        for tensor, storage in zip(results, storages, strict=True):
            node = node_of(tensor)
            cell = Cell(self._slots.measure(tensor), is_hooked=node is not None)
            if node is not None:
                node.metadata.setdefault(_CELLS, {})[tensor.output_nr] = cell
            version = version_of(tensor)
            record.results.append(cell)
            record.alive.append((weakref.ref(tensor), version))
            self._known.add(tensor, storage, version, cell)

    def _input(self, record: CallRecord, tensor: Tensor, storage: Any) -> Input:
        if tensor.requires_grad and is_leaf(tensor):
            return Input((self._leaf(record, tensor),), False)
        found = self._known.find(tensor, storage)
        if found is not None:
            last = found[0][-1]
            if not last.is_hooked and (node := node_of(tensor)) is not None:
                last.is_hooked = True  # like that of a torch.autograd.Function
                calls = (each for each in reversed(self.records) if isinstance(each, CallRecord))
                source = next((each for each in calls if last in each.results), record)
                _hook_function(self, record, node, source.module)
            return Input(*found)
        node = node_of(tensor)
        maker = None if node is None else _name_of(node)
        if node is None and not (self.has_gradients and self._is_gradient(tensor)):
            maker = ""
        cell = Cell(self._slots.measure(tensor), maker)
        self._known.add(tensor, storage, version_of(tensor), cell)
        if node is not None:
            cell.sources = self._sources(record, node)
            _hook_function(self, record, node, record.module)
        return Input((cell,), False)

    def _leaf(self, record: CallRecord, tensor: Tensor) -> Leaf:
        key, version = id(tensor), version_of(tensor)
        leaf = self._leaves.get(key)
        if leaf is None or leaf.version != version or leaf.reference() is not tensor:
            leaf = self._leaves[key] = Leaf(tensor, version)
            known = self._known
            found = known.find(tensor, storage_of(tensor)) if is_measurable(tensor) else None
            leaf.sources = [] if found is None else [*found[0]]  # the program wrote them
        leaf.name = leaf.name or self.name_of(tensor)
        return leaf

    def name_of(self, parameter: Tensor) -> str:
        """Returns a parameter's name in the outermost running module, or in an earlier one that held it.

        It is known from then on, also once the module is gone.
        """
        found = self._names.get(id(parameter))
        if found is None or found[0]() is not parameter:
            root, _ = spot()
            if root is None:
                return ""
            found = weakref.ref(parameter), ""
            self._names |= {
                id(each): (weakref.ref(each), name) for name, each in named_tensors(root)
            }
            found = self._names.setdefault(id(parameter), found)
        return found[1]

    def _sources(self, record: CallRecord, node: Any) -> list[Cell]:
        """Returns the cells of the tensors from which unobserved functions made a tensor."""
        found: list[Cell] = []
        for following, number in sources_of(
            [node], lambda each: _CELLS in each.metadata, _MOST_NODES
        ):
            if _CELLS not in following.metadata:
                found.append(self._leaf(record, following.variable))
            elif number in (cells := following.metadata[_CELLS]):
                found.append(cells[number])
        return found

    def _add_target(self, record: CallRecord, tensor: Tensor, storage: Any) -> None:
        """Adds the former state of an argument that the call wrote to, or returned."""
        before = self._known.find(tensor, storage)
        record.writes = before is None
        cells = self._known.before(tensor, storage) if before is None else before[0]
        if cells is None:
            record.is_unsure = True
            cells = (Cell(None),)
            cells[0].extremes = None
        record.inputs.append(Input(cells, False))

    def _try(
        self,
        record: CallRecord,
        arguments: Arguments | None,
        inputs: list[Tensor],
        results: list[Tensor],
    ) -> Arguments | None:
        """Tries a failed call while its inputs exist; returns the data for trying its backward."""
        if results[0].is_cpu or self.waits:
            if not self._are_finite(record.results):
                for given in record.inputs:
                    if isinstance(given.cells[0], Leaf):
                        given.cells[0].look()
                if arguments is not None and not record.writes:
                    record.trial = tried_forward(record.call, arguments, results)
                if record.trial is None or record.trial.bits:
                    record.trial = self._trace_back(record, record.trial)
            if not record.writes:
                return arguments
        if arguments is not None and len(record.inputs) == len(inputs):
            record.outline = arguments.outline()
        return None

    def _trace_back(
        self, record: CallRecord, trial: Trial | None, gradients: Mapping[int, Tensor] | None = None
    ) -> Trial | None:
        """Tries the calls that led to a failed one, a few times for each line of the program."""
        self._traced[record.call.location] += 1
        is_new = self._traced[record.call.location] <= _MOST_TRACED
        if not is_new or not self._are_finite([c for each in record.inputs for c in each.cells]):
            return trial
        calls = [each for each in self.records if isinstance(each, CallRecord)]
        found = traced_back(record, [*self._carried, *calls], trial, gradients)
        if gradients is None and self.has_gradients and (found is None or found.bits):
            found = lost_gradient(record, self.records, self._extremes_of) or found
        return found

    def _extremes_of(self, cell: Cell) -> Extremes | None:
        with self._lock:
            return cell.extremes if cell.slot is None else self._slots.extremes(cell.slot)

    def _are_finite(self, cells: list[Cell]) -> bool:
        with self._lock:
            return all(
                cell.bits == 0 if cell.slot is None else self._slots.is_finite(cell.slot)
                for cell in cells
            )

    # --- gradients -------------------------------------------------------------------------------

    def gradients(self, gradients: Iterable[Tensor | None]) -> list[Cell]:
        """Returns the cells of these gradients, measured if necessary."""
        found: list[Cell] = []
        known = self._known
        with self._lock:
            for gradient in gradients:
                if not is_measurable(gradient) or is_captured(gradient):
                    continue
                storage = storage_of(gradient)
                before = known.find(gradient, storage)
                if before is not None:
                    found += before[0]
                    continue
                cell = Cell(self._slots.measure(gradient))
                known.add(gradient, storage, version_of(gradient), cell)
                found.append(cell)
                self._arriving.append(cell)
        return found

    def try_backward(
        self, record: GradientRecord, arguments: Arguments | None, gradients: Mapping[int, Tensor]
    ) -> None:
        """Tries a call's backward again, if it made finite gradients non-finite."""
        if gradients and not self._are_finite(record.after) and self._are_finite(record.before):
            if arguments is not None:
                record.trial = tried(record.record.call, arguments, gradients)
            if record.trial is None or record.trial.bits:
                record.trial = self._trace_back(record.record, record.trial, gradients)
        elif gradients and arguments is not None and record.after:
            call = record.record.call
            is_half = torch.float16 in (call.dtype, *call.cast_dtypes)
            if is_half and not self._has_lost and self._are_zero(record):
                is_lost = has_gradient(call, arguments, gradients)
                record.trial = Trial(0, is_underflow=True, loser=call) if is_lost else None
                self._has_lost |= is_lost

    def _are_zero(self, record: GradientRecord) -> bool:
        """Whether a call's gradients are zero, but not those that it got."""
        before, after = (
            [any(self._extremes_of(each) or ()) for each in cells]
            for cells in (record.before, record.after)
        )
        return any(before) and not any(after)

    def add(self, record: GradientRecord) -> None:
        """Adds gradients."""
        self.has_gradients = self.trains = True
        with self._lock:
            self._owners = None
            self.records.append(record)

    def _is_gradient(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is the gradient of a leaf of this step, which was measured on its way."""
        if self._owners is None:
            owned = [(leaf, leaf.reference()) for leaf in self._leaves.values()]
            self._owners = {id(owner.grad): leaf for leaf, owner in owned if owner is not None}
        leaf = self._owners.get(id(tensor))
        owner = None if leaf is None else leaf.reference()
        return owner is not None and owner.grad is tensor


def _has_non_finite(values: Iterable[Any]) -> bool:
    """Whether any argument of a call is the number NaN or an infinity."""
    return any([type(value) is float and not math.isfinite(value) for value in values])  # noqa: C419


# --- hooks on autograd nodes ---------------------------------------------------------------------


class _Hooks:
    """The hooks on the nodes of one call, with the same lifetime.

    They keep the call's arguments, if its backward may be tried, until the backward has run.
    """

    __slots__ = ("_arguments", "_arrived", "_gradients", "_left", "_name", "_notes", "_record")

    def __init__(
        self, notes: Notes, record: CallRecord, name: str, arguments: Arguments | None
    ) -> None:
        self._notes, self._record, self._name = notes, record, name
        self._arguments, self._left = arguments, 0
        self._arrived: list[Cell] = []
        self._gradients: dict[int, Tensor] = {}

    def on_nodes(self, entries: Mapping[Any, Mapping[int, int]], exits: _Exits) -> None:
        """Hooks the results' nodes (number of a gradient -> of a result), and where inputs' gradients leave."""
        self._left = len(exits)
        for node, numbers in entries.items():
            if node not in exits:
                node.register_prehook(functools.partial(self._arrive, numbers))
        for node, edges in exits.items():
            node.register_hook(functools.partial(self._pass_on, edges, entries.get(node)))

    @spared
    @unseen
    def _arrive(self, numbers: Mapping[int, int], grad_outputs: Sequence[Tensor | None]) -> None:
        if not self._is_closed():
            self._take(numbers, grad_outputs)
            self._add([])

    @spared
    @unseen
    def _pass_on(
        self,
        edges: Sequence[int],
        numbers: Mapping[int, int] | None,
        grad_inputs: Sequence[Tensor | None],
        grad_outputs: Sequence[Tensor | None],
    ) -> None:
        """Records the gradients of inputs, and those of results if no other node gets them first."""
        if self._is_closed():
            return
        if numbers is not None:
            self._take(numbers, grad_outputs)
        self._add(self._notes.gradients([grad_inputs[e] for e in edges if e < len(grad_inputs)]))
        self._left -= 1
        if not self._left:
            self._release()

    def _is_closed(self) -> bool:
        if self._notes.is_open and not is_off_limits():
            return False
        self._release()
        return True

    def _release(self) -> None:
        self._arguments, self._gradients = None, {}

    def _take(self, numbers: Mapping[int, int], gradients: Sequence[Tensor | None]) -> None:
        self._arrived = self._notes.gradients(gradients)
        if self._record.given is not None:
            for position, number in numbers.items():
                if (gradient := gradients[position]) is not None:
                    self._gradients[number] = gradient

    def _add(self, after: list[Cell]) -> None:
        notes, before = self._notes, self._arrived
        if before or after:
            record = GradientRecord(self._record, self._name, before, after)
            if self._record.given is not None:
                notes.try_backward(record, self._arguments, self._gradients)
            notes.add(record)


def _hook_call(
    notes: Notes,
    record: CallRecord,
    inputs: Sequence[Tensor],
    results: Sequence[Tensor],
    arguments: Arguments | None,
) -> None:
    """Records gradients where they enter and leave the backward of a call."""
    nodes: dict[Any, dict[int, int]] = {}
    for number, each in enumerate(results):
        if (node := node_of(each)) is not None:
            nodes.setdefault(node, {})[each.output_nr] = number
    if not nodes:
        return
    stops = {node for each in inputs if (node := node_of(each)) is not None}
    if any([each is result for result in results for each in inputs]):  # noqa: C419
        # It was written to, or returned as it is: its earlier node is unknown.
        entries = list(nodes) if record.writes else []
        exits: _Exits = {node: range(len(edges_of(node))) for node in entries}
    else:
        entries = [node for node in nodes if node not in stops]
        exits = _boundary(entries, stops)
    _Hooks(notes, record, "", arguments).on_nodes({each: nodes[each] for each in entries}, exits)


def _hook_function(notes: Notes, record: CallRecord, node: Any, module: str) -> None:
    """Records gradients at the node of a function that is not an observed call, made in a module."""
    node.metadata[_MODULE] = module
    _Hooks(notes, record, _name_of(node), None).on_nodes(
        {node: {}}, {node: range(len(edges_of(node)))}
    )


def _boundary(entries: Sequence[Any], stops: Container[Any]) -> _Exits:
    """Returns node -> its edges that leave the call, to nodes in ``stops`` and to leaves.

    ``stops`` are nodes of inputs, which the caller holds.
    """
    seen, pending = set(entries), list(entries)
    exits: dict[Any, list[int]] = {}
    while pending:
        node = pending.pop()
        for edge, (following, _) in enumerate(edges_of(node)):
            if following is None:
                continue
            if _is_leaf(following) or following in stops:
                exits.setdefault(node, []).append(edge)
            elif following not in seen:
                seen.add(following)
                pending.append(following)
        if len(seen) > _MOST_NODES:
            return {node: range(len(edges_of(node))) for node in entries}
    return exits


def sources_of(
    nodes: Iterable[Any],
    is_known: Callable[[Any], bool] = lambda node: False,
    most: float = math.inf,
) -> list[tuple[Any, int]]:
    """Returns the edges from the graph behind ``nodes`` to known nodes and to leaves."""
    pending = list(nodes)
    found, seen = [], set(pending)
    while pending and len(seen) <= most:
        for edge in edges_of(pending.pop()):
            following = edge[0]
            if following is None:
                continue
            if is_known(following) or _is_leaf(following):
                found.append(edge)
            elif following not in seen:
                seen.add(following)
                pending.append(following)
    return found


def _is_leaf(node: Any) -> bool:
    return type(node).__name__ == "AccumulateGrad"


def _name_of(node: Any) -> str:
    """Returns a node's name: ``"MulBackward0"``."""
    return str(node.name()).rpartition("::")[2]
