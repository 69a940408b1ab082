"""Functions that graphs of torch.fx and classes hold stay what they were for the program."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import hmpx

BF16, FP32 = torch.bfloat16, torch.float32


class Products(nn.Module):
    """A module whose calls passes of torch.fx look for."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(torch.matmul(self.inner(x), x)) + F.gelu(x)


def replaced(graph: fx.GraphModule) -> int:
    """Returns how many products a pass of torch.fx replaces."""
    found = fx.replace_pattern(graph, lambda a, b: torch.matmul(a, b), lambda a, b: torch.mm(a, b))
    return len(found)


def compared(graph: fx.GraphModule) -> int:
    """Returns how many products are found by comparing with the function under the name."""
    products = graph.graph.find_nodes(op="call_function", target=torch.matmul)
    assert products == [node for node in graph.graph.nodes if node.target is torch.matmul]
    return len(products)


@pytest.mark.parametrize("found", [replaced, compared])
def test_passes_find_functions_wherever_a_graph_was_traced(
    found: Callable[[fx.GraphModule], int],
) -> None:
    module = Products()
    before = [fx.symbolic_trace(module) for _ in range(2)]
    with hmpx.convert(device_types={"cpu"}):
        during = fx.symbolic_trace(module), fx.symbolic_trace(module)
        assert found(before[0]) == found(during[0]) == found(fx.symbolic_trace(module)) == 1
        with hmpx.convert(device_types={"cpu"}, lists="hmp"):
            assert found(copy.deepcopy(during[1])) == 1
    assert found(before[1]) == found(during[1]) == 1


def test_nodes_can_be_changed_on_the_other_side() -> None:
    """Graphs look their nodes up by function, too."""
    before = fx.symbolic_trace(Products())
    with hmpx.convert(device_types={"cpu"}):
        during = fx.symbolic_trace(Products())
        swap(before)
        assert fx.Interpreter(before).run(torch.rand(3, 3)).dtype is FP32
    swap(during)


def swap(graph: fx.GraphModule) -> None:
    """Puts `torch.mm` in place of products, and erases the last function."""
    for node in graph.graph.find_nodes(op="call_function", target=torch.matmul):
        node.target = torch.mm
    (gelu,) = graph.graph.find_nodes(op="call_function", target=F.gelu)
    gelu.replace_all_uses_with(next(iter(graph.graph.nodes)))
    graph.graph.erase_node(gelu)
    graph.graph.lint()
    graph.recompile()
    assert len(graph.graph.find_nodes(op="call_function", target=torch.mm)) == 1
    assert not graph.graph.find_nodes(op="call_function", target=F.gelu)


def test_an_interpreter_casts_while_converted() -> None:
    """As a traced module does when it runs, whether it was traced before or meanwhile."""
    module, x = Products(), torch.randn(3, 3)
    before = fx.symbolic_trace(module)
    with hmpx.convert(device_types={"cpu"}):
        expected, during = module(x), fx.symbolic_trace(module)
        for graph in (before, during):
            for run in (graph, fx.Interpreter(graph).run, fx.Transformer(graph).transform()):
                torch.testing.assert_close(run(x), expected, rtol=0, atol=0)
        with hmpx.disable_casts():
            assert fx.Interpreter(before).run(x).dtype is FP32
    for graph in (before, during):
        torch.testing.assert_close(fx.Interpreter(graph).run(x), module(x), rtol=0, atol=0)


GATES: dict[str, Any] = {
    "policy": {"lists": "none", "low": ["sigmoid", "linear", "normalize"]},
    "device_types": {"cpu"},
    "legalize": "never",
}


def gate() -> nn.Module:
    """Returns a module of a new class, which holds functions of torch."""

    class Product:
        product = F.linear

    class Gate(Product, nn.Module):
        act = torch.sigmoid
        method = torch.Tensor.sigmoid  # binds as torch's does

        def forward(self, x: Tensor) -> Tensor:
            return self.product(self.act(x), x)

    return Gate()


def test_a_builtin_in_a_class_is_not_a_method() -> None:
    x = torch.rand(3, 3)
    with hmpx.convert(**GATES):
        made = gate()
        assert made(x).dtype is BF16
        assert made.act is torch.sigmoid
        assert isinstance(made.method, types.MethodType)
        with hmpx.disable_casts():
            assert made(x).dtype is FP32
    torch.testing.assert_close(made(x), gate()(x), rtol=0, atol=0)
    assert "__init_subclass__" not in vars(nn.Module)
