"""Groups the steps of autograd's graph: ops with what belongs to them, and the casts between.

Autograd's graph holds more than a reader looks for: views, and around a legalized op the casts that
upcast its inputs and round its result. Views become part of the edges. Of an op that was observed all
nodes are one node, except the casts that the policy asked for.
"""

from __future__ import annotations

import torch

from ..observers import OpCall
from ..tensors import LOW_DTYPES, short_name
from .graph import Kind
from .groups import Group
from .modules import derived_modules
from .observing import Names, Observation
from .walking import Step


class Builder:
    """Groups steps, and names and connects the groups."""

    def __init__(self, steps: list[Step], names: Names, observation: Observation | None) -> None:
        """Takes what was walked, and what was noted while it was made."""
        self.steps, self._names, self._observation = steps, names, observation
        self._calls: list[int | None] = [None] * len(steps)
        if observation is not None:
            owned = (observation.owners.get(id(step.node)) for step in steps)
            self._calls = [None if owner is None else owner[1] for owner in owned]
        self._sources = [self._source(at) for at in range(len(steps))]
        self.groups: list[Group] = []
        self._group_of: dict[int, int] = {}

    def build(self) -> list[Group]:
        """Returns the groups, those nearest to the output first."""
        by_call: dict[int, int] = {}
        results: dict[int, int] = {}  # the steps that made the calls' results, views among them
        for at, step in enumerate(self.steps):
            call = self._calls[at]
            if call is not None:
                results.setdefault(call, at)
            if self._sources[at] != (at, 0) and step.kind == "view":
                continue
            if call is None or step.kind == "leaf" or self._is_policys_cast(at):
                self._add(at, call)
            elif call in by_call:
                self._join(at, by_call[call])
            else:
                by_call[call] = self._add(at, call)
                self.groups[-1].result = results[call]
        self._connect()
        self._place()
        return self.groups

    def group_of(self, at: int) -> int:
        """Returns the group that shows the step at that position."""
        return self._group_of[self._sources[at][0]]

    def formats(self) -> frozenset[str]:
        """Returns the names of the number formats that ops compute in."""
        calls = [] if self._observation is None else self._observation.calls
        return frozenset([_computed(call) for call in calls if _is_format(call)])

    # --- which steps are one node -----------------------------------------------------------------

    def _source(self, at: int) -> tuple[int, int]:
        """Returns the step that made the values of a view, and the output; of another step itself."""
        output = 0
        while self.steps[at].kind == "view" and len(self.steps[at].inputs) == 1:
            at, output = self.steps[at].inputs[0]
        return at, output

    def _origin(self, at: int) -> int | None:
        """Returns the step whose result a cast takes."""
        inputs = self.steps[at].inputs
        return self._sources[inputs[0][0]][0] if inputs else None

    def _is_policys_cast(self, at: int) -> bool:
        """Whether the step of an observed call casts an input to the type that the op computes in."""
        if self.steps[at].kind != "cast":
            return False
        call, origin = self._call(at), self._origin(at)
        if call is None or origin is None or self._calls[origin] == self._calls[at]:
            return False
        before, after = self._cast(at)
        return after == _computed(call) and before != after

    def _call(self, at: int) -> OpCall | None:
        call = self._calls[at]
        if call is None or self._observation is None:
            return None
        return self._observation.calls[call]

    def _cast(self, at: int) -> tuple[str, str]:
        """Returns the types that a cast is from and to; number formats count."""
        step, call = self.steps[at], self._call(at)
        after = short(step.output()[0])
        if call is not None and _is_format(call) and after != _computed(call):
            after = _computed(call)
        if not step.inputs:
            return "", after
        position, output = step.inputs[0]
        before = short(self.steps[position].output(output)[0])
        origin = self._origin(at)
        made_by = None if origin is None else self._call(origin)
        if made_by is not None and _is_format(made_by):
            before = _computed(made_by)
        if before == after:  # rounded, within one dtype
            return before, after if call is not None and _is_format(call) else "rounded"
        return before, after

    def _add(self, at: int, call: int | None) -> int:
        step = self.steps[at]
        dtype = short(step.output()[0])
        if step.leaf is not None:
            name = self._names.parameters.get(id(step.leaf))
            kind: Kind = "input" if name is None else "parameter"
            group = Group([at], kind, "input" if name is None else name, dtype)
        elif step.kind == "cast" and (call is None or self._is_policys_cast(at)):
            before, after = self._cast(at)
            made = dtype if after == "rounded" else after
            group = Group([at], "cast", f"{before or '?'} -> {after or '?'}", made)
            group.call = self._call(at)
        else:
            observed = self._call(at)
            group = Group([at], "op", step.op, dtype, call=observed)
            if observed is not None:
                group.label = observed.op
                group.dtype = _computed(observed) or dtype
                group.is_legalized = _is_format(observed)
                self._note_kernel(group, step)
        self.groups.append(group)
        self._group_of[at] = len(self.groups) - 1
        return len(self.groups) - 1

    def _join(self, at: int, group: int) -> None:
        self.groups[group].steps.append(at)
        self._group_of[at] = group
        self._note_kernel(self.groups[group], self.steps[at])

    def _note_kernel(self, group: Group, step: Step) -> None:
        """Notes that an op computes in fp32 although its call is in low precision."""
        call, made = group.call, step.output()[0]
        if call is not None and call.dtype in LOW_DTYPES and step.kind == "op":
            group.is_legalized |= made is torch.float32 or step.is_own

    # --- what connects them -----------------------------------------------------------------------

    def _connect(self) -> None:
        for position, group in enumerate(self.groups):
            seen = set()
            for at in group.steps:
                for source, output in self.steps[at].inputs:
                    made, of_made = self._sources[source]
                    from_group = self._group_of[made]
                    taken = output if made == source else of_made
                    if from_group != position and (from_group, made, taken) not in seen:
                        seen.add((from_group, made, taken))
                        group.inputs.append((from_group, made, taken))

    def _place(self) -> None:
        """Finds the modules: by what was noted, else by the parameters that ops take."""
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
            derived_modules(self.groups)


def _computed(call: OpCall) -> str:
    return "" if call.dtype is None else short_name(call.dtype)


def _is_format(call: OpCall) -> bool:
    return call.dtype is not None and not isinstance(call.dtype, torch.dtype)


def short(dtype: torch.dtype | None) -> str:
    """Returns the short name of a dtype; "" for an unknown one."""
    return "" if dtype is None else short_name(dtype)
