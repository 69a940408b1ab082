"""Rounding as one op of compiled graphs: where it is taken, and that it rounds as eager mode does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

import hmpx
from hmpx import formats
from hmpx.formats import Table, quantize

from .test_quantize import assert_same

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("fresh_dynamo"),
]
OP = torch.ops.hmpx.rounded.default


def counting(graphs: list[torch.fx.GraphModule]) -> Any:
    """Returns a back end that notes the graphs it is given, forward and backward."""

    def keep(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=keep, bw_compiler=keep)


def calls(graph: torch.fx.GraphModule) -> list[Any]:
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def roundings(graph: torch.fx.GraphModule) -> int:
    """Returns how many values are rounded; one that is rounded twice counts once."""
    nodes = [node for node in graph.graph.nodes if node.target is OP]
    sources = [node.args[0].args[0] for node in nodes]  # what was detached
    return sum(source.target is not OP for source in sources)


@pytest.mark.parametrize("round_gradients", [False, True])
@pytest.mark.parametrize("name", ["float8_e4m3fn", "posit16_1", "mxfp8_e4m3", "bfloat16"])
def test_a_rounding_is_one_node(name: str, round_gradients: bool) -> None:
    """In the forward and the backward; values and gradients are those of eager mode, bit for bit."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(40, 64), nn.GELU(), nn.Linear(64, 7)), torch.randn(5, 40)
    graphs: list[torch.fx.GraphModule] = []
    with hmpx.convert(
        low_precision_type=formats.get(name),
        round_gradients=round_gradients,
        device_types={"cpu"},
    ):
        expected = model(x)
        expected.square().sum().backward()
        wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        found = torch.compile(model, backend=counting(graphs), fullgraph=True)(x)
        found.square().sum().backward()
    assert torch.equal(found, expected)
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)
    assert len(graphs) == 2
    assert roundings(graphs[0]) == 8  # input, weight, bias and output of each of two layers
    assert (OP in calls(graphs[1])) == round_gradients
    integers = [target for target in calls(graphs[0]) if "bitwise" in str(target)]
    assert not integers


@pytest.mark.parametrize("dynamic", [False, True])
def test_strides_and_sizes(dynamic: bool) -> None:
    """The op's result has the strides that its fake kernel says, whatever those of its input."""
    known = ["float8_e4m3fn", "mxfp8_e4m3", Table("table", (-1.0, 0.0, 0.5))]
    compiled = torch.compile(
        lambda y: [quantize(y, format) + 1 for format in known],
        backend="aot_eager",
        fullgraph=True,
        dynamic=dynamic,
    )
    x = torch.randn(6, 5, 40)
    for y in (x, x.permute(2, 0, 1), x[:, ::2], x[:0]):
        for actual, format in zip(compiled(y), known, strict=True):
            expected = quantize(y, format) + 1
            assert_same(actual, expected, y)
            assert actual.stride() == expected.stride()


def test_noise_of_compiled_graphs() -> None:
    """Each call draws anew, from the default generator, and rounds to neighbours."""
    compiled = torch.compile(
        functools.partial(quantize, format="float8_e4m3fn", rounding="stochastic"),
        backend="aot_eager",
        fullgraph=True,
    )
    x = torch.randn(1000)
    low, high = quantize(x, "float8_e4m3fn", "down"), quantize(x, "float8_e4m3fn", "up")
    torch.manual_seed(3)
    first, second = compiled(x), compiled(x)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(compiled(x), first)
    for found in (first, second):
        assert ((found == low) | (found == high)).all()


def test_exported_programs_hold_torchs_ops_only() -> None:
    """They run where hmpx is not installed; so do graphs of make_fx."""

    class Rounded(nn.Module):
        def forward(self, y: Tensor) -> Tensor:
            return F.relu(quantize(y, "float8_e4m3fn"))

    x = torch.randn(3, 8)
    for strict in (False, True):
        program = torch.export.export(Rounded(), (x,), strict=strict)
        assert OP not in calls(program.graph_module)
        assert torch.equal(program.module()(x), Rounded()(x))
    assert OP not in calls(make_fx(Rounded())(x))
