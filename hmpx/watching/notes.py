"""Records each call of a watched program and its gradients.

Runs within the program, never waits for a device and records no gradients. It keeps no tensors alive except
the inputs of low-precision calls on the CPU, until their backward has run.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch import Tensor

from ..observers import OpCall
from ..tensors import is_leaf, node_of, tensors_in
from ..torch_state import running_module
from .gradients import MOST, hook_call, hook_function, name_of, sources_of
from .records import (
    CallRecord,
    Cell,
    GradientRecord,
    Input,
    KnownTensors,
    Leaf,
    is_captured,
    is_measurable,
    is_off_limits,
    storage_of,
    version_of,
)
from .slots import Slots
from .trials import Arguments, can_change, kept, tried, tried_forward

#: Key of a node's metadata for the cells of its results.
_CELLS: Final = "hmpx.watched"

#: Ops whose results are uninitialized memory.
_UNSET: Final = frozenset({"resize", "resize_as", "is_set_to"})


class Notes:
    """The records of one step, in order."""

    def __init__(self) -> None:
        self.records: list[CallRecord | GradientRecord] = []
        self.step = 0
        self.is_open = True  # calls and gradients are recorded
        self.has_gradients = False
        self.waits = False  # calls that fail on accelerators are tried at once, as on the CPU
        self._slots = Slots()
        self._known = KnownTensors()
        self._leaves: dict[int, Leaf] = {}
        self._owners: dict[int, Leaf] | None = None  # of gradients
        self._lock = threading.RLock()

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
            extremes = self._slots.read()
            self._leaves, self._owners = {}, None
            self._known.forget(only_dead=not ends_step)
            if ends_step:
                self.has_gradients = False
                if extremes is None:
                    return []
            for record in records:
                for cell in record.cells():
                    if cell.slot is not None:
                        cell.extremes = (0.0, 0.0) if extremes is None else extremes[cell.slot]
                        cell.slot = None
            return records

    # --- calls -----------------------------------------------------------------------------------

    def add_call(  # like a `ValueObserver`
        self,
        call: OpCall,
        inputs: list[Tensor],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> None:
        """Records a call after it ran."""
        if not self.is_open or is_off_limits():
            return
        written = args[0] if call.op == "setitem" else result
        if is_measurable(written):
            results = [written]
        else:
            results = [each for each in tensors_in([written]) if is_measurable(each)]
        if not results or is_captured(results[0]):
            return
        record = CallRecord(call, self.step)
        record.is_intended = call.op in _UNSET or _has_non_finite(args)
        if kwargs and not record.is_intended:
            record.is_intended = _has_non_finite(kwargs.values())
        with self._lock:
            self._measure(record, inputs, results)
            self.records.append(record)
        arguments = None
        if not record.is_intended:
            arguments = kept(args, kwargs, inputs) if can_change(call) else None
            arguments = self._try(record, arguments, inputs, results)
        hook_call(self, record, inputs, results, arguments)

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
                hook_function(self, record, node)
            return Input(*found)
        node = node_of(tensor)
        maker = None if node is None else name_of(node)
        if node is None and not (self.has_gradients and self._is_gradient(tensor)):
            maker = ""
        cell = Cell(self._slots.measure(tensor), maker)
        self._known.add(tensor, storage, version_of(tensor), cell)
        if node is not None:
            cell.sources = self._sources(record, node)
            hook_function(self, record, node)
        return Input((cell,), False)

    def _leaf(self, record: CallRecord, tensor: Tensor) -> Leaf:
        key, version = id(tensor), version_of(tensor)
        leaf = self._leaves.get(key)
        if leaf is None or leaf.version != version or leaf.reference() is not tensor:
            leaf = Leaf(tensor, version, running_module(), record.call.module)
            self._leaves[key] = leaf
        return leaf

    def _sources(self, record: CallRecord, node: Any) -> list[Cell]:
        """Returns the cells of the tensors from which unobserved functions made a tensor."""
        found: list[Cell] = []
        for following, number in sources_of([node], lambda each: _CELLS in each.metadata, MOST):
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
        else:
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
            if not record.writes:
                return arguments
        if arguments is not None and len(record.inputs) == len(inputs):
            record.outline = arguments.outline()
        return None

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
        return found

    def try_backward(
        self, record: GradientRecord, arguments: Arguments, gradients: Mapping[int, Tensor]
    ) -> None:
        """Tries a call's backward again, if it made finite gradients non-finite."""
        if gradients and self._are_finite(record.before) and not self._are_finite(record.after):
            record.trial = tried(record.record.call, arguments, gradients)

    def add(self, record: GradientRecord) -> None:
        """Adds gradients."""
        self.has_gradients = True
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
