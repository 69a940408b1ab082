"""`draw`: takes a result, or a model or function that computes one, and draws its graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from torch import Tensor, nn

from .. import arguments, torch_state
from ..compute import saved_by
from ..errors import OptionError, raised_here, shown
from ..inputs import arguments_of
from ..renames import renamed
from ..session import restoring
from ..tensors import node_of
from .autograd import Names, Observation, Step, observed, short, walk
from .graph import Edge, Node, Saved
from .groups import DrawnGroup, Grouping, outputs_first
from .picture import Drawing

#: The walk exceeds ``max_nodes`` by this factor, since views and steps of observed ops are not drawn.
_WALKED: Final = 10

#: Most autograd names kept for one node.
_MOST_NAMES: Final = 20


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
            steps, positions = walk([tensor for _, tensor in found.values()], _WALKED * max_nodes)
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
        grad_fn=tuple([step.name for step in own[:_MOST_NAMES]]),
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
