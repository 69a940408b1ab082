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

from ..compute import ALL_NUMBERS, LOOKED_UP, NUMBERS, SCALED
from ..number_formats import has_kernels
from ..version import __version__

_aten, _prims = torch.ops.aten, torch.ops.prims
_CAST: Final = _prims.convert_element_type.default
_BF16, _F32 = torch.bfloat16, torch.float32

#: Ops that take longer than to write a tensor, look it up, and read what was found.
_SLOW: Final = frozenset({_aten.erf.default, _aten.log1p.default, _aten.tanh.default})

#: Elements of a call, and of all calls that share a table: making it takes as long as that of NUMBERS.
_LEAST: Final = NUMBERS
_LEAST_TOGETHER: Final = 8 * NUMBERS

#: An op, and its arguments as text, in which formulas stand as `_Numbered`.
_Formula = tuple[Any, str]


@dataclass(frozen=True, slots=True)
class _Numbered:
    """A formula among arguments, whose text is that of no number."""

    formula: int


@dataclass(frozen=True, slots=True)
class _Function:
    """What a node computes of a bfloat16 tensor, element by element.

    Attributes:
        source: The tensor. Its elements, and those of all that is computed of it, lie in memory in their order.
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
        value: What tables hold: the node itself, or the float32 node that its factors are multiplied by.
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
            # Left to itself inductor need not round what is looked up. An artefact runs without hmpx, too.
            if config.emulate_precision_casts and not config.cpp_wrapper:
                tabulate(graph)

        def uuid(self) -> Any:
            return "hmpx", __version__, has_kernels()

    return Tabulated()


def tabulate(graph: fx.Graph) -> None:
    """Has a graph look up what it computes of bfloat16 numbers on the CPU, where that is faster."""
    functions = _functions(graph)
    by_formula: dict[int, list[_Call]] = defaultdict(list)
    for call in _calls(graph, functions):
        by_formula[call.function.formula].append(call)
    shared = [calls for calls in by_formula.values() if _elements(calls) >= _LEAST_TOGETHER]
    if not shared or not has_kernels():
        return
    start = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(start):
        numbers = graph.call_function(ALL_NUMBERS)
        tables = [
            _copied(graph, calls[0].value, calls[0].function.source, numbers) for calls in shared
        ]
    found = {
        call.node: _looked_up(graph, call, values)
        for calls, values in zip(shared, tables, strict=True)
        for call in calls
    }
    for node, one in found.items():  # once all are there: one may look up what another found
        node.replace_all_uses_with(one)
        graph.erase_node(node)
    for node in reversed(functions):
        if node not in found and not node.users:
            graph.erase_node(node)


def _functions(graph: fx.Graph) -> dict[fx.Node, _Function]:
    """Returns the nodes that compute something of one bfloat16 tensor, and what."""
    functions: dict[fx.Node, _Function] = {}
    known: dict[_Formula, int] = {}  # equal formulas have one number

    def numbered(node: fx.Node) -> Any:
        return _Numbered(functions[node].formula)

    def formula(node: fx.Node) -> int:
        args = fx.node.map_arg((node.args, node.kwargs), numbered)
        return known.setdefault((node.target, repr(args)), len(known))

    for node in graph.nodes:
        if node.op != "call_function" or not _is_plain(node):
            continue
        if _is_raised(node):
            if _is_plain(node.args[0]):
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
        if _dtype(node) is not _BF16:
            continue
        function, product = functions.get(node), node.args[0]
        if function is not None:
            if function.is_slow:
                yield _Call(node, node, None, function)
            continue
        if product.target is not _aten.mul.Tensor or len(product.all_input_nodes) != 2:
            continue
        first, second = product.all_input_nodes
        for factors, value in ((first, second), (second, first)):
            function = functions.get(value)
            if function is None or not function.is_slow or _dtype(value) is not _F32:
                continue
            if factors in functions and _is_raised(factors) and _shape(factors) == _shape(value):
                yield _Call(node, value, factors.args[0], function)
                break


def _is_raised(node: fx.Node) -> bool:
    """Whether a node is a bfloat16 tensor in float32."""
    return node.target is _CAST and _dtype(node) is _F32 and _dtype(node.args[0]) is _BF16


def _is_elementwise(node: fx.Node) -> bool:
    """Whether each element follows from those of the inputs in its place alone, all of one shape."""
    tags = getattr(node.target, "tags", ())
    if node.target is not _CAST and torch.Tag.pointwise not in tags:
        return False
    if torch.Tag.nondeterministic_seeded in tags:
        return False
    if any(isinstance(arg, torch.memory_format) for arg in (*node.args, *node.kwargs.values())):
        return False  # a table has another number of dimensions
    shapes = {_shape(node), *map(_shape, node.all_input_nodes)}
    return len(shapes) == 1


def _is_plain(node: Any) -> bool:
    """Whether a node is a large tensor on the CPU that lies in memory in the order of its elements.

    Large is what is worth a call. Asks nothing that sets a guard.
    """
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    if not all(type(size) is int for size in (*value.shape, *value.stride())):
        return False
    if value.device.type != "cpu" or value.numel() < _LEAST:
        return False
    step, steps = 1, []
    for size in reversed(value.shape):
        steps.append(step)
        step *= size
    # Not `is_contiguous`: where a size is one, others than those that an operator returns pass it.
    return value.stride() == tuple(reversed(steps))


def _shape(node: fx.Node) -> torch.Size:
    shape: torch.Size = node.meta["val"].shape
    return shape


def _dtype(node: Any) -> Any:
    return getattr(node.meta.get("val"), "dtype", None)


def _elements(calls: list[_Call]) -> int:
    return sum(_shape(call.node).numel() for call in calls)


def _looked_up(graph: fx.Graph, call: _Call, values: fx.Node) -> fx.Node:
    given = (call.function.source, values)
    with graph.inserting_before(call.node):
        if call.factors is None:
            found = graph.call_function(LOOKED_UP, given)
        else:
            found = graph.call_function(SCALED, (call.factors, *given))
    found.meta = dict(call.node.meta)
    return found


def _copied(graph: fx.Graph, value: fx.Node, source: fx.Node, numbers: fx.Node) -> fx.Node:
    """Returns ``value``, computed of ``numbers`` instead of ``source``."""
    copies = {source: numbers}

    def copy(node: fx.Node) -> fx.Node:
        if node not in copies:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), copy)
            copies[node] = graph.create_node("call_function", node.target, args, kwargs)
        return copies[node]

    return copy(value)
