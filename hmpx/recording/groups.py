"""Groups the steps of autograd's graph into ops, and the casts between them.

Autograd's graph has details that readers do not need: views, and the casts around a legalized op. Views become
part of the edges. All nodes of an observed op become one node, except the casts that the policy requires.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from ..observers import OpCall
from ..tensors import LOW_DTYPES, short_name
from .autograd import Names, Observation, Step, short
from .graph import Kind


@dataclass
class DrawnGroup:
    """Steps drawn as one `Node`, with their data."""

    steps: list[int]  # their positions; first the one that made the result
    kind: Kind
    label: str
    dtype: str = ""
    module: str | None = None  # None while unknown
    result: int | None = None  # the step whose result has the shape; None for the first one
    call: OpCall | None = None  # the observed call
    is_legalized: bool = False
    inputs: list[tuple[int, int, int]] = field(default_factory=list)  # group, step, its output

    @property
    def sources(self) -> set[int]:
        """The groups whose tensors it takes."""
        return {source for source, _, _ in self.inputs}


class Grouping:
    """Groups steps, those nearest to the output first, and names and connects the groups."""

    def __init__(self, steps: list[Step], names: Names, observation: Observation | None) -> None:
        self.steps, self._names, self._observation = steps, names, observation
        self._calls: list[int | None] = [None] * len(steps)
        if observation is not None:
            owned = (observation.owners.get(id(step.node)) for step in steps)
            self._calls = [None if owner is None else owner[1] for owner in owned]
        self._sources = [self._source(at) for at in range(len(steps))]
        self.groups: list[DrawnGroup] = []
        self._group_of: dict[int, int] = {}
        expected: dict[int, int] = {}
        results: dict[int, int] = {}  # the steps that made the calls' results, views among them
        for at, step in enumerate(steps):
            call = self._calls[at]
            if call is not None:
                results.setdefault(call, at)
            if self._sources[at] != (at, 0) and step.kind == "view":
                continue
            if call is None or step.kind == "leaf" or self._is_policys_cast(at):
                self._add(at)
            elif call in expected:
                group = self.groups[expected[call]]
                group.steps.append(at)
                self._group_of[at] = expected[call]
                _mark_legalized(group, step)
            else:
                expected[call] = len(self.groups)
                self._add(at)
                self.groups[-1].result = results[call]
        self._connect()
        self._place()

    def group_of(self, at: int) -> int:
        """Returns the group that contains the step at that position."""
        return self._group_of[self._sources[at][0]]

    def formats(self) -> frozenset[str]:
        """Returns the names of the number formats that ops compute in."""
        calls = [] if self._observation is None else self._observation.calls
        return frozenset([_computed(call) for call in calls if _is_format(call)])

    # --- which steps are one node -----------------------------------------------------------------

    def _source(self, at: int) -> tuple[int, int]:
        """Returns the step and output that made the values of a view; another step is its own."""
        output = 0
        while self.steps[at].kind == "view" and len(self.steps[at].inputs) == 1:
            at, output = self.steps[at].inputs[0]
        return at, output

    def _origin(self, at: int) -> int | None:
        """Returns the step whose result a cast takes."""
        inputs = self.steps[at].inputs
        return self._sources[inputs[0][0]][0] if inputs else None

    def _is_policys_cast(self, at: int) -> bool:
        """Whether the step casts an observed call's input to the dtype that the op computes in."""
        call, origin = self._call(at), self._origin(at)
        if self.steps[at].kind != "cast" or call is None or origin is None:
            return False
        before, after = self._cast(at)
        is_own = self._calls[origin] == self._calls[at]
        return not is_own and after == _computed(call) and before != after

    def _call(self, at: int) -> OpCall | None:
        call = self._calls[at]
        return None if call is None or self._observation is None else self._observation.calls[call]

    def _cast(self, at: int) -> tuple[str, str]:
        """Returns the source and target types of a cast, including number formats."""
        step, call, origin = self.steps[at], self._call(at), self._origin(at)
        is_format = _is_format(call)
        after = _computed(call) if is_format else short(step.output()[0])
        if not step.inputs:
            return "", after
        position, output = step.inputs[0]
        before = short(self.steps[position].output(output)[0])
        made_by = None if origin is None else self._call(origin)
        if _is_format(made_by):
            before = _computed(made_by)
        if before == after and not is_format:
            return before, "rounded"  # within one dtype
        return before, after

    def _add(self, at: int) -> None:
        step, call = self.steps[at], self._call(at)
        dtype = short(step.output()[0])
        if step.leaf is not None:
            name = self._names.parameters.get(id(step.leaf))
            kind: Kind = "input" if name is None else "parameter"
            group = DrawnGroup([at], kind, "input" if name is None else name, dtype)
        elif step.kind == "cast" and (call is None or self._is_policys_cast(at)):
            before, after = self._cast(at)
            made = dtype if after == "rounded" else after
            group = DrawnGroup([at], "cast", f"{before or '?'} -> {after or '?'}", made, call=call)
        else:
            group = DrawnGroup([at], "op", step.op, dtype, call=call)
            if call is not None:
                group.label, group.dtype = call.op, _computed(call) or dtype
                group.is_legalized = _is_format(call)
                _mark_legalized(group, step)
        self._group_of[at] = len(self.groups)
        self.groups.append(group)

    # --- connections ------------------------------------------------------------------------------

    def _connect(self) -> None:
        for position, group in enumerate(self.groups):
            found: dict[tuple[int, int, int], None] = {}
            for at in group.steps:
                for source, output in self.steps[at].inputs:
                    made, of_made = self._sources[source]
                    from_group = self._group_of[made]
                    if from_group != position:
                        found[from_group, made, output if made == source else of_made] = None
            group.inputs = list(found)

    def _place(self) -> None:
        """Finds the modules: as observed, else by the parameters that ops take."""
        observation = self._observation
        for group in self.groups:
            step = self.steps[group.steps[0]]
            if step.leaf is not None:
                if group.kind == "parameter":
                    group.module = group.label.rpartition(".")[0]
            elif observation is not None:
                group.module = observation.module_of(step.number)
                if group.module is None and group.call is not None:
                    group.module = group.call.module
        if self._names.parameters and (observation is None or not observation.boundaries):
            for position in reversed(outputs_first(self.groups)):
                group = self.groups[position]
                taken = [self.groups[source] for source in group.sources]
                if group.kind != "parameter":
                    near = [each.module for each in taken if each.kind in ("parameter", "cast")]
                    group.module = _around(near)


def _computed(call: OpCall | None) -> str:
    return "" if call is None or call.dtype is None else short_name(call.dtype)


def _is_format(call: OpCall | None) -> bool:
    return call is not None and call.dtype is not None and not isinstance(call.dtype, torch.dtype)


def _mark_legalized(group: DrawnGroup, step: Step) -> None:
    """Marks an op that computes in fp32 although its call is in low precision."""
    call, made = group.call, step.output()[0]
    if call is not None and call.dtype in LOW_DTYPES and step.kind == "op":
        group.is_legalized |= made is torch.float32 or step.is_own


def outputs_first(groups: Sequence[DrawnGroup]) -> list[int]:
    """Returns the positions in an order in which each comes before those whose tensors it takes."""
    waits = [0] * len(groups)
    for group in groups:
        for source in group.sources:
            waits[source] += 1
    order = [position for position, count in enumerate(waits) if not count]
    for position in order:  # grows in the loop
        for source in groups[position].sources:
            waits[source] -= 1
            if not waits[source]:
                order.append(source)
    return order


def _around(paths: Iterable[str | None]) -> str | None:
    """Returns the innermost module that contains all known ones of these; None if none is known."""
    known = [path.split(".") if path else [] for path in paths if path is not None]
    if not known:
        return None
    parts = zip(*known, strict=False)
    same = itertools.takewhile(lambda each: len(set(each)) == 1, parts)
    return ".".join(each[0] for each in same)
