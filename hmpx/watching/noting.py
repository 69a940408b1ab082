"""Notes each call of a watched program and the gradients that go back through it.

Runs amid the program: it waits for no device, records no gradients and keeps no tensor alive.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..observers import OpCall
from ..tensors import edges_of, is_leaf, node_of, tensors_in
from ..torch_internals import (
    dispatch_modes,
    has_tangents,
    is_graph_made,
    is_jit_tracing,
    transforms,
)
from ..torch_state import running_module
from .backward_nodes import Exits, boundary, name_of
from .known_tensors import KnownTensors, is_measurable, storage_of
from .records import (
    UNSET,
    CallRecord,
    Cell,
    GradientRecord,
    Input,
    Leaf,
    version_of,
)
from .slots import Slots


class Notes:
    """What is noted of one step.

    Attributes:
        records: In the order of events.
        step: Number of the step.
        is_open: Whether anything is noted.
        has_gradients: Gradients have been noted.
    """

    def __init__(self) -> None:
        """Starts with none."""
        self.records: list[CallRecord | GradientRecord] = []
        self.step = 0
        self.is_open = True
        self.has_gradients = False
        self._slots = Slots()
        self._known = KnownTensors()
        self._leaves: dict[int, Leaf] = {}
        self._owners: dict[int, Leaf] | None = None  # of gradients
        self._lock = threading.RLock()

    @property
    def is_full(self) -> bool:
        """Whether they should be taken before more are noted."""
        return self._slots.is_full

    def take(self, *, ends_step: bool) -> list[CallRecord | GradientRecord]:
        """Returns the records with all that was measured, and starts anew; waits for devices.

        At the end of a step they are left out if all values were finite.
        """
        with self._lock:
            records, self.records = self.records, []
            extremes = self._slots.read()
            self._leaves, self._owners = {}, None
            if ends_step:
                self.has_gradients = False
                self._known.forget()
                if extremes is None:
                    return []
            else:
                self._known.forget_dead()
            for record in records:
                for cell in _cells_of(record):
                    if cell.slot is not None:
                        cell.extremes = (0.0, 0.0) if extremes is None else extremes[cell.slot]
                        cell.slot = None
            return records

    # --- calls -----------------------------------------------------------------------------------

    def note_call(  # as of a `ValueObserver`
        self,
        call: OpCall,
        inputs: list[Tensor],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> None:
        """Notes a call after it ran."""
        if not self.is_open or is_off_limits():
            return
        written = args[0] if call.op == "setitem" else result
        if is_measurable(written):
            results = [written]
        else:
            results = [each for each in tensors_in([written]) if is_measurable(each)]
        if not results or is_captured(results[0]):
            return
        record = CallRecord(call, self.step, [])
        record.is_intended = call.op in UNSET or _has_non_finite(args)
        if kwargs and not record.is_intended:
            record.is_intended = _has_non_finite(kwargs.values())
        with self._lock:
            self._note_values(record, inputs, results)
            self.records.append(record)
        self._hook(record, inputs, results)

    def _note_values(self, record: CallRecord, inputs: list[Tensor], results: list[Tensor]) -> None:
        storages = [storage_of(each) for each in results]
        ours = [each._cdata for each in storages]
        for tensor in inputs:
            if not is_measurable(tensor):
                record.is_unsure = True
                continue
            storage = storage_of(tensor)
            if storage._cdata in ours:
                self._note_target(record, tensor, storage)
            else:
                record.inputs.append(self._input(record, tensor, storage))
        for tensor, storage in zip(results, storages, strict=True):
            cell = Cell(self._slots.measure(tensor), is_hooked=node_of(tensor) is not None)
            version = version_of(tensor)
            record.results.append(cell)
            record.alive.append((weakref.ref(tensor), version))
            self._known.note(tensor, storage, version, cell)

    def _input(self, record: CallRecord, tensor: Tensor, storage: Any) -> Input:
        if tensor.requires_grad and is_leaf(tensor):
            key, version = id(tensor), version_of(tensor)
            leaf = self._leaves.get(key)
            if leaf is None or leaf.version != version or leaf.reference() is not tensor:
                leaf = Leaf(tensor, version, running_module(), record.call.module)
                self._leaves[key] = leaf
            return Input((leaf,), False)
        found = self._known.find(tensor, storage)
        if found is not None:
            if not found[0][-1].is_hooked and (node := node_of(tensor)) is not None:
                found[0][-1].is_hooked = True  # as of a torch.autograd.Function
                self._hook_made_outside(record, node)
            return Input(*found)
        node = node_of(tensor)
        maker = None if node is None else name_of(node)
        if node is None and not (self.has_gradients and self._is_gradient(tensor)):
            maker = ""
        cell = Cell(self._slots.measure(tensor), maker)
        self._known.note(tensor, storage, version_of(tensor), cell)
        if node is not None:
            self._hook_made_outside(record, node)
        return Input((cell,), False)

    def _is_gradient(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is the gradient of a leaf of this step: it was looked at on its way there."""
        if self._owners is None:
            owned = [(leaf, leaf.reference()) for leaf in self._leaves.values()]
            self._owners = {id(owner.grad): leaf for leaf, owner in owned if owner is not None}
        leaf = self._owners.get(id(tensor))
        owner = None if leaf is None else leaf.reference()
        return owner is not None and owner.grad is tensor

    def _note_target(self, record: CallRecord, tensor: Tensor, storage: Any) -> None:
        """Notes what an argument was that the call wrote to, or returned."""
        before = self._known.find(tensor, storage)
        record.writes = before is None
        cells = self._known.before(tensor, storage) if before is None else before[0]
        if cells is None:
            record.is_unsure = True
        else:
            record.inputs.append(Input(cells, False))

    # --- gradients -------------------------------------------------------------------------------

    def _hook(self, record: CallRecord, inputs: list[Tensor], results: list[Tensor]) -> None:
        """Has gradients noted where they enter and leave the backward of a call."""
        nodes = dict.fromkeys([node for each in results if (node := node_of(each)) is not None])
        if not nodes:
            return
        stops: dict[Any, torch.dtype | None] = {}
        for each in inputs:
            if (node := node_of(each)) is not None:
                dtype = each.dtype
                stops[node] = dtype if stops.get(node, dtype) is dtype else None
        if any([each is result for result in results for each in inputs]):  # noqa: C419
            # It was written to, or returned as it is: what its node was before is unknown.
            entries = list(nodes) if record.writes else []
            exits: Exits = {node: range(len(edges_of(node))) for node in entries}
        else:
            entries = [node for node in nodes if node not in stops]
            dtypes = record.call.cast_dtypes
            widest = torch.float64 if torch.float64 in dtypes else torch.float32
            exits = boundary(entries, stops, widest)
        self._hook_nodes(record, "", entries, exits)

    def _hook_made_outside(self, record: CallRecord, node: Any) -> None:
        """Has gradients noted at the node of a function that is not an observed call."""
        self._hook_nodes(record, name_of(node), [node], {node: range(len(edges_of(node)))})

    def _hook_nodes(self, record: CallRecord, name: str, entries: list[Any], exits: Exits) -> None:
        hooks = _Hooks(self, record, name)
        for node in entries:
            if node not in exits:
                node.register_prehook(hooks.arrive)
        for node, edges in exits.items():
            node.register_hook(functools.partial(hooks.pass_on, edges, node in entries))

    def gradients(self, gradients: Iterable[Tensor | None]) -> list[Cell]:
        """Returns what is known of these gradients, measured if need be."""
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
                known.note(gradient, storage, version_of(gradient), cell)
                found.append(cell)
        return found

    def add(self, record: GradientRecord) -> None:
        """Notes gradients."""
        self.has_gradients = True
        with self._lock:
            self._owners = None
            self.records.append(record)


class _Hooks:
    """The hooks on the autograd nodes of one call: they live as long as these."""

    __slots__ = ("_arrived", "_name", "_notes", "_record")

    def __init__(self, notes: Notes, record: CallRecord, name: str) -> None:
        self._notes, self._record, self._name = notes, record, name
        self._arrived: list[Cell] = []

    def arrive(self, grad_outputs: Sequence[Tensor | None]) -> None:
        """Notes the gradients of the results."""
        notes = self._notes
        if not notes.is_open or is_off_limits():
            return
        self._arrived = notes.gradients(grad_outputs)
        self._add([])

    def pass_on(
        self,
        edges: Sequence[int],
        is_entry: bool,
        grad_inputs: Sequence[Tensor | None],
        grad_outputs: Sequence[Tensor | None],
    ) -> None:
        """Notes the gradients of the inputs, and those of the results if no other node gets them first."""
        notes = self._notes
        if not notes.is_open or is_off_limits():
            return
        if is_entry:
            self._arrived = notes.gradients(grad_outputs)
        self._add(notes.gradients([grad_inputs[e] for e in edges if e < len(grad_inputs)]))

    def _add(self, after: list[Cell]) -> None:
        notes, before = self._notes, self._arrived
        if before or after:
            notes.add(GradientRecord(self._record, self._name, before, after, notes.step))


def _cells_of(record: CallRecord | GradientRecord) -> list[Cell]:
    if isinstance(record, GradientRecord):
        return record.before + record.after
    return [*record.results, *(cell for each in record.inputs for cell in each.cells)]


def is_off_limits() -> bool:
    """Whether calls made here have no values, or belong to a transform or a trace."""
    if transforms() is not None or is_jit_tracing() or has_tangents():
        return True
    return bool(dispatch_modes()) and is_graph_made()


def is_captured(tensor: Tensor) -> bool:
    """Whether calls with ``tensor`` are being recorded for a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _has_non_finite(values: Iterable[Any]) -> bool:
    """Whether any of a call's arguments is the number NaN or an infinity."""
    for value in values:  # noqa: SIM110  # a generator takes longer
        if type(value) is float and not math.isfinite(value):
            return True
    return False
