"""`draw`: takes a result, or what computes one, and makes the drawing of its graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch import Tensor, nn

from .. import arguments, torch_state
from ..arguments import is_a
from ..errors import OptionError, shown
from ..tensors import node_of
from .building import Builder
from .finishing import finished
from .observing import Names, Observation, graph_tensors, observed
from .picture import Drawing
from .walking import walk


def draw(
    output: Any,
    *inputs: Any,
    model: nn.Module | None = None,
    params: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | None = None,
    max_nodes: int = 1000,
    fold: bool = True,
) -> Drawing:
    """Returns a drawing of the autograd graph of a result: ops by the type they compute in, and casts.

    Of a tensor all is drawn that autograd knows: its own names of ops, and their dtypes. More is known
    of a model or a function that `draw` calls itself: the names of ops, their modules and lines, and
    which of them are legalized. Then casts and roundings that belong to an op are part of it, and a
    diamond is a cast that the policy asked for.

    Args:
        output: A tensor, or any dict, list, tuple or dataclass with tensors; or a model or another
            function, which is called with ``inputs``, once, and with gradients.
        *inputs: Arguments of that call.
        model: The model whose parameters are named and whose modules are boxed; where ``output`` is a
            model, that one. If the result is given, modules are told from the parameters around an op.
        params: Names of other tensors, as `torchviz.make_dot` takes them: name -> tensor.
        max_nodes: How many nodes to draw; those nearest to the result.
        fold: Whether the picture shows, of modules that are alike and follow each other, the first.

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
    if type(max_nodes) is not int or max_nodes < 1:
        raise OptionError(f"max_nodes must be a positive integer, not {shown(max_nodes)}")
    arguments.truth("fold", fold)
    is_call = not isinstance(output, Tensor) and callable(output)
    if inputs and not is_call:
        raise OptionError(f"inputs are for a model or a function to call, not for {shown(output)}")
    if model is None and isinstance(output, nn.Module):
        model = output
    names = Names(model)
    for name, tensor in _named(params):
        names.parameters[id(tensor)] = name
    observation: Observation | None = None
    result = output
    if is_call:
        result, observation = observed(output, inputs, names)
    found = graph_tensors(result)
    if not found:
        raise OptionError(_why_no_graph(output, is_call=is_call))
    with torch_state.without_casts():
        steps, positions = walk([tensor for _, tensor in found], _WALKED * max_nodes)
    builder = Builder(steps, names, observation)
    builder.build()
    ends = [(place, tensor, positions[id(node_of(tensor))]) for place, tensor in found]
    nodes, edges, left_out = finished(builder, ends, max_nodes)
    return Drawing(nodes, edges, left_out, names.classes, builder.formats(), fold)


#: Views and what belongs to observed ops are not drawn, so more is walked than ``max_nodes``.
_WALKED: Final = 10


def _named(params: object) -> list[tuple[str, Tensor]]:
    if params is None:
        return []
    what = "a dict of names to tensors"
    if is_a(params, Mapping):
        pairs = [*arguments.mapping("params", params, what).items()]
    else:
        pairs = arguments.items("params", params, what)
    for pair in pairs:
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
        if not is_pair or not is_a(pair[0], str) or not isinstance(pair[1], Tensor):
            raise OptionError(f"params must be {what}; it holds {shown(pair)}")
    return [(str.__str__(name), tensor) for name, tensor in pairs]


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
