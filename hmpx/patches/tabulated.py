"""Functions of bfloat16 numbers in inductor's graphs: computed for all 65,536 numbers, and looked up.

Where vector instructions are for float32 alone, a graph computes a function such as GELU of rounded
inputs, and rounds it, for each element. Looked up it has the same bits: its table is computed in the
same graph by the same instructions. A function is whatever ops compute from one tensor, element by element.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx

from ..compute import LOOKED_UP, NUMBERS, SCALED
from ..number_formats import kernels_may_come
from ..version import __version__

_aten, _prims = torch.ops.aten, torch.ops.prims
_CAST: Final = _prims.convert_element_type.default
_BF16, _F32 = torch.bfloat16, torch.float32

#: Ops that take longer than to write a tensor, look it up, and read what was found.
_SLOW: Final = frozenset({_aten.erf.default, _aten.log1p.default, _aten.tanh.default})

#: Elements of a call, and of all calls that share a table: making it takes as long as that of NUMBERS.
_LEAST: Final = NUMBERS
_LEAST_TOGETHER: Final = 8 * NUMBERS

#: An op, and its arguments as text, in which functions stand as their numbers.
_Formula = tuple[Any, str]


@dataclass(frozen=True, slots=True)
class _Function:
    """What a node computes of a bfloat16 tensor, element by element.

    Attributes:
        source: The tensor.
        formula: A number, the same for functions that are computed alike.
        is_slow: Whether one of `_SLOW` is in it.
    """

    source: fx.Node
    formula: int
    is_slow: bool


@dataclass(frozen=True, slots=True)
class _Call:
    """A node that can be looked up.

    Attributes:
        node: bfloat16.
        value: What tables hold: the node itself, or what its factors are multiplied by.
        factors: A bfloat16 tensor, or None.
        function: That of ``value``.
    """

    node: fx.Node
    value: fx.Node
    factors: fx.Node | None
    function: _Function


def pass_of(base: Any, config: Any) -> Any:
    """Returns a pass over graphs for inductor.

    Args:
        base: inductor's class of such passes.
        config: inductor's settings.
    """

    class Tabulated(base):  # type: ignore[misc]
        """Looks functions up, where that is faster."""

        def __call__(self, graph: fx.Graph) -> None:
            if not config.cpp_wrapper:  # an artefact, which runs without hmpx, too
                tabulate(graph)

        def uuid(self) -> Any:
            return "hmpx", __version__, kernels_may_come()

    return Tabulated()


def tabulate(graph: fx.Graph) -> None:
    """Has a graph look up what it computes of bfloat16 numbers on the CPU, where that is faster."""
    functions = _functions(graph)
    by_formula: dict[int, list[_Call]] = defaultdict(list)
    for call in _calls(graph, functions):
        by_formula[call.function.formula].append(call)
    shared = [calls for calls in by_formula.values() if _elements(calls) >= _LEAST_TOGETHER]
    if not shared or not kernels_may_come():
        return
    start = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(start):
        numbers = _numbers(graph)
    for calls in shared:
        with graph.inserting_before(start):
            values = _copied(graph, calls[0].value, calls[0].function.source, numbers)
        for call in calls:
            given = (call.function.source, values)
            with graph.inserting_before(call.node):
                if call.factors is None:
                    found = graph.call_function(LOOKED_UP, given)
                else:
                    found = graph.call_function(SCALED, (call.factors, *given))
            found.meta = dict(call.node.meta)
            call.node.replace_all_uses_with(found)
    graph.eliminate_dead_code()


def _functions(graph: fx.Graph) -> dict[fx.Node, _Function]:
    """Returns the nodes that compute something of one bfloat16 tensor, and what."""
    functions: dict[fx.Node, _Function] = {}
    known: dict[_Formula, int] = {}  # equal formulas have one number

    def formula(node: fx.Node) -> int:
        args = fx.node.map_arg((node.args, node.kwargs), lambda each: functions[each].formula)
        return known.setdefault((node.target, repr(args)), len(known))

    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
            continue
        if _is_raised(node):
            functions[node] = _Function(node.args[0], -1, False)
            continue
        inputs = [functions.get(each) for each in node.all_input_nodes]
        found = [each for each in inputs if each is not None]
        is_of_one = len({each.source for each in found}) == 1 and len(found) == len(inputs)
        if is_of_one and _is_elementwise(node):
            is_slow = node.target in _SLOW or any(each.is_slow for each in found)
            functions[node] = _Function(found[0].source, formula(node), is_slow)
    return functions


def _calls(graph: fx.Graph, functions: dict[fx.Node, _Function]) -> Iterator[_Call]:
    """Yields the nodes that round a function of one tensor, perhaps times another tensor."""
    for node in graph.find_nodes(op="call_function", target=_CAST):
        if node.meta["val"].dtype is not _BF16:
            continue
        function, product = functions.get(node), node.args[0]
        if function is not None:
            if function.is_slow and _is_large(function.source):
                yield _Call(node, node, None, function)
            continue
        if product.target is not _aten.mul.Tensor or len(product.all_input_nodes) != 2:
            continue
        first, second = product.args
        for factors, value in ((first, second), (second, first)):
            function = functions.get(value)
            if function is None or not function.is_slow or not _is_raised(factors):
                continue
            source, given = function.source, factors.args[0]
            if _is_large(source) and _is_large(given) and _shape(source) == _shape(given):
                yield _Call(node, value, given, function)
                break


def _is_raised(node: Any) -> bool:
    """Whether a node is a bfloat16 tensor in float32."""
    if node.target is not _CAST or node.meta["val"].dtype is not _F32:
        return False
    source = node.args[0].meta.get("val")
    return isinstance(source, Tensor) and source.dtype is _BF16


def _is_elementwise(node: fx.Node) -> bool:
    """Whether each element follows from those of the inputs in its place alone, all of one shape."""
    tags = getattr(node.target, "tags", ())
    if node.target is not _CAST and torch.Tag.pointwise not in tags:
        return False
    if torch.Tag.nondeterministic_seeded in tags:
        return False
    shapes = {_shape(node), *map(_shape, node.all_input_nodes)}
    return len(shapes) == 1


def _shape(node: fx.Node) -> torch.Size:
    shape: torch.Size = node.meta["val"].shape
    return shape


def _is_large(node: fx.Node) -> bool:
    """Whether looking up each element of a tensor is worth a call; asks nothing that sets a guard."""
    value: Tensor = node.meta["val"]
    if not all(type(size) is int for size in (*value.shape, *value.stride())):
        return False
    return value.device.type == "cpu" and value.numel() >= _LEAST and value.is_contiguous()


def _elements(calls: list[_Call]) -> int:
    return sum(_shape(call.node).numel() for call in calls)


def _numbers(graph: fx.Graph) -> fx.Node:
    """Returns all numbers of bfloat16 in the order of their bits, in float32."""
    device = torch.device("cpu")
    kinds: dict[str, Any] = {
        "start": 0,
        "step": 1,
        "dtype": torch.int32,
        "device": device,
        "requires_grad": False,
    }
    index = graph.call_function(_prims.iota.default, (NUMBERS,), kinds)
    bits = graph.call_function(_aten.bitwise_left_shift.Tensor_Scalar, (index, 16))
    return graph.call_function(_aten.view.dtype, (bits, _F32))


def _copied(graph: fx.Graph, value: fx.Node, source: fx.Node, numbers: fx.Node) -> fx.Node:
    """Returns ``value``, computed of all numbers instead of ``source``."""
    copies: dict[fx.Node, fx.Node] = {}

    def copy(node: fx.Node) -> fx.Node:
        if node.args[0] is source:
            return numbers
        if node not in copies:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), copy)
            copies[node] = graph.create_node("call_function", node.target, args, kwargs)
        return copies[node]

    return copy(value)
