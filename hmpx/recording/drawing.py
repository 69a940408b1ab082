"""`draw`: takes a result, or a model or function that computes one, and draws its graph."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .. import arguments, torch_state
from ..compute import saved_by
from ..errors import OptionError, raised_here, shown
from ..inputs import arguments_of
from ..observers import OpCall
from ..renames import renamed
from ..session import restoring
from ..tensors import LOW_DTYPES, node_of, short_name
from .autograd import Names, Observation, Step, observed, short, walk
from .graph import Edge, Kind, Node, Saved
from .picture import Drawing


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
        for position, group in enumerate(self.groups):
            taken: dict[tuple[int, int, int], None] = {}
            for at in group.steps:
                for source, output in self.steps[at].inputs:
                    made, of_made = self._sources[source]
                    from_group = self._group_of[made]
                    if from_group != position:
                        taken[from_group, made, output if made == source else of_made] = None
            group.inputs = list(taken)
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


# --- which steps are one node --------------------------------------------------------------------


@restoring
@renamed()
def draw(
    output: Any,
    inputs: Any = (),
    *,
    model: nn.Module | None = None,
    params: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | None = None,
    max_nodes: int = 1000,
    fold: bool = True,
) -> Drawing:
    """Draws the autograd graph of a result: ops by the dtype they compute in, and casts.

    For a tensor it shows autograd's names of ops, and their dtypes. For a model or a function it
    also has names, modules and lines, and shows which ops are legalized.

    Args:
        output: A tensor, or any dict, list, tuple or dataclass with tensors; or a model or another
            function, which is called once with ``inputs``, and with gradients.
        inputs: The arguments of that call ([inputs](#inputs)).
        model: The model for parameter names and module boxes; by default ``output`` itself, if it
            is a model.
        params: Names of other tensors, as for `torchviz.make_dot`: name -> tensor.
        max_nodes: Most nodes drawn; those nearest to the result are.
        fold: Whether the picture shows only the first of similar modules that follow each other.

    Returns:
        A `Drawing`: ``.save("graph.svg")``, ``.dot``, ``.nodes``; notebooks show it.

    Raises:
        OptionError: There is no graph, or an argument has an invalid value.

    Example:
        >>> x, weight = torch.ones(3, 4), torch.ones(2, 4, requires_grad=True)
        >>> with hmpx.convert(device_types={"cpu"}, legalize="never"):
        ...     loss = torch.nn.functional.linear(x, weight).softmax(1).sum()
        >>> drawing = hmpx.draw(loss, params={"weight": weight})
        >>> [node.label for node in drawing.nodes if node.kind == "cast"]
        ['fp32 -> bf16', 'bf16 -> fp32']
    """
    if model is not None and not isinstance(model, nn.Module):
        raise OptionError(f"model must be a torch.nn.Module, not {shown(model)}")
    arguments.whole("max_nodes", max_nodes, 1)
    arguments.truth("fold", fold)
    is_call = not isinstance(output, Tensor) and callable(output)
    if any(arguments_of(inputs)) and not is_call:
        raise OptionError(f"inputs are for a model or a function to call, not for {shown(output)}")
    if model is None and isinstance(output, nn.Module):
        model = output
    names = Names(model)
    names.parameters.update({id(tensor): name for name, tensor in _named(params).items()})
    observation: Observation | None = None
    with torch_state.unchanged(output if is_call else None, inputs):
        result = output
        if is_call:
            result, observation = observed(output, inputs, names)
        found: dict[int, tuple[str, Tensor]] = {}
        for place, tensor in _graph_tensors(result):
            found.setdefault(id(tensor), (place, tensor))
        if not found:
            raise OptionError(_why_no_graph(output, is_call=is_call))
        with torch_state.without_casts():
            # More steps than nodes, since views and steps of observed ops are not drawn.
            steps, positions = walk([tensor for _, tensor in found.values()], 10 * max_nodes)
        grouping = Grouping(steps, names, observation)
        ends = [(place, tensor, positions[id(node_of(tensor))]) for place, tensor in found.values()]
        nodes, edges, left_out = _finished(grouping, ends, max_nodes)
        return Drawing(nodes, edges, left_out, names.classes, grouping.formats(), fold)


def _named(params: Any) -> dict[str, Tensor]:
    try:
        found: dict[Any, Any] = dict(params or ())
        if all(isinstance(n, str) and isinstance(each, Tensor) for n, each in found.items()):
            return found
    except raised_here(TypeError, ValueError):
        pass
    raise OptionError(f"params must be a dict of names to tensors, not {shown(params)}")


def _why_no_graph(output: Any, *, is_call: bool) -> str:
    if is_call:
        return (
            "the result of the call has no autograd graph: none of its tensors depends on a parameter "
            "or an input with requires_grad=True, or it was computed without gradients"
        )
    if isinstance(output, Tensor) and output.requires_grad:
        return "output has no autograd graph: it is a leaf; draw what is computed from it"
    if isinstance(output, (Tensor, Mapping, list, tuple)):
        return (
            "output has no autograd graph: no tensor in it requires gradients; compute it outside of "
            "torch.no_grad(), from something with requires_grad=True"
        )
    return f"draw takes a tensor, tensors in a dict, list or tuple, or a model, not {shown(output)}"


def _graph_tensors(value: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors in ``value`` that have a graph, with their places: ``"['logits']"``."""
    items: Iterable[tuple[str, Any]] = ()
    if isinstance(value, Tensor):
        if node_of(value) is not None:
            yield place, value
    elif isinstance(value, Mapping):
        items = [(f"[{key!r}]", each) for key, each in value.items()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = [(f"[{position}]", each) for position, each in enumerate(value)]
    elif dataclasses.is_dataclass(value):
        names = [each.name for each in dataclasses.fields(value)]
        items = [(f".{name}", getattr(value, name, None)) for name in names]
    for at, each in items:
        yield from _graph_tensors(each, place + at)


# --- nodes and edges -----------------------------------------------------------------------------


def _finished(
    grouping: Grouping, outputs: Iterable[tuple[str, Tensor, int]], max_nodes: int
) -> tuple[tuple[Node, ...], tuple[Edge, ...], int]:
    """Returns nodes and edges from the inputs to the outputs, and the number of nodes omitted.

    ``outputs`` has for each drawn tensor its place in the given value, the tensor, and its step's position.
    """
    groups, steps, formats = grouping.groups, grouping.steps, grouping.formats()
    ends = [(place, tensor, grouping.group_of(at)) for place, tensor, at in outputs]
    nearest = list(dict.fromkeys(position for _, _, position in ends))
    seen = set(nearest)
    for position in nearest:  # grows in the loop
        for source in dict.fromkeys(source for source, _, _ in groups[position].inputs):
            if source not in seen:
                seen.add(source)
                nearest.append(source)
    left_out = max(0, len(nearest) - max_nodes)
    drawn = set(nearest[:max_nodes])
    nodes: list[Node] = []
    edges: dict[Edge, None] = {}

    def name_of(position: int) -> str:
        return f"n{position}" if position in drawn else "cut"

    is_whole = not any(step.is_open for step in steps)
    if left_out or not is_whole:
        left_out = max(left_out, 1)
        least = "" if is_whole else "at least "
        label = f"{least}{left_out:,} more nodes; max_nodes={max_nodes:,}"
        nodes.append(Node("cut", "cut", label))
    in_order = [*reversed(outputs_first(groups)), *reversed(nearest)]
    for position in dict.fromkeys(each for each in in_order if each in drawn):
        group = groups[position]
        nodes.append(_node(position, group, steps))
        if any(steps[at].is_open for at in group.steps):
            edges[Edge("cut", f"n{position}")] = None
        for source, made, output in group.inputs:
            dtype, shape = steps[made].output(output)
            named = groups[source].dtype if groups[source].dtype in formats else short(dtype)
            edges[Edge(name_of(source), f"n{position}", named, shape)] = None
    for count, (place, tensor, position) in enumerate(ends):
        kind = short(tensor.dtype), None if tensor.is_nested else tuple(tensor.shape)
        nodes.append(Node(f"out{count}", "output", f"output{place}", *kind))
        edges[Edge(name_of(position), f"out{count}", *kind)] = None
    return tuple(nodes), tuple(edges), left_out


def _node(position: int, group: DrawnGroup, steps: list[Step]) -> Node:
    call = group.call
    own = [steps[at] for at in group.steps]
    result = own[0] if group.result is None else steps[group.result]
    return Node(
        id=f"n{position}",
        kind=group.kind,
        label=group.label,
        dtype=group.dtype,
        shape=result.output()[1],
        module=group.module or "",
        location="" if call is None else call.location,
        reason="" if call is None else call.reason,
        grad_fn=tuple([step.name for step in own[:20]]),
        is_legalized=group.is_legalized,
        saved=tuple([saved for step in own for saved in _saved(step)]),
    )


def _saved(step: Step) -> Iterator[Saved]:
    """Yields the tensors that autograd keeps for a step; those packed by the program's hooks are unknown."""
    if step.leaf is not None:
        return
    for each in saved_by(step.node):
        tensor = each.data
        if isinstance(tensor, Tensor):
            shape = None if tensor.is_nested else tuple([int(size) for size in tensor.shape])
            yield Saved(short(tensor.dtype), shape, tensor.numel() * tensor.itemsize)
