"""Functions of bfloat16 numbers that compiled graphs look up."""

from __future__ import annotations

import contextvars
from collections.abc import Callable

import pytest
import torch
import torch._inductor.codegen.cpp
import torch.nn.functional as F
from torch import Tensor, fx

import hmpx
from hmpx.compute import number_tables
from hmpx.patches import tabulated
from tests.patches.traced_graphs import NUMBERS, SETTING, operators, traced

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("fresh_dynamo"),
]


@pytest.fixture(autouse=True)
def kernels_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tabulated, "has_kernels", lambda: True)


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether all bits are equal, of zeros and infinities, too; NaNs have many."""
    is_nan = a.isnan()
    a_bits, b_bits = (each.view(torch.int16).masked_fill(is_nan, 0) for each in (a, b))
    return torch.equal(is_nan, b.isnan()) and torch.equal(a_bits, b_bits)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu of tanh": lambda x: F.gelu(x, approximate="tanh"),
    "mish": F.mish,
    "a user's own": lambda x: (torch.tanh(x.float()) * x.float() + 1).bfloat16(),
}


@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_all_numbers_are_looked_up_to_the_same_values(
    name: str, has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_kernels:
        monkeypatch.setattr(number_tables, "bfloat16_kernels", lambda: None)
    module = traced(ACTIVATIONS[name], NUMBERS)
    expected = module(NUMBERS)
    tabulated.tabulate(module.graph)
    module.recompile()
    assert operators(module.graph) == ["hmpx.looked_up.default"]
    assert equal(module(NUMBERS), expected)


@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("op", ["gelu", "gelu tanh"])
def test_gradients_are_multiplied_by_what_is_looked_up(
    op: str, has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_kernels:
        monkeypatch.setattr(number_tables, "bfloat16_kernels", lambda: None)
    kind = "tanh" if "tanh" in op else "none"

    def backward(gradient: Tensor, x: Tensor) -> Tensor:
        return torch.ops.aten.gelu_backward(gradient, x, approximate=kind)

    gradients = torch.randn(NUMBERS.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    module = traced(backward, gradients, NUMBERS)
    expected = module(gradients, NUMBERS)
    tabulated.tabulate(module.graph)
    module.recompile()
    assert operators(module.graph) == ["hmpx.scaled.default"]
    assert equal(module(gradients, NUMBERS), expected)


def test_calls_of_one_function_share_its_table() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return F.gelu(x) + F.gelu(y)

    module = traced(function, NUMBERS, NUMBERS)
    tabulated.tabulate(module.graph)
    assert len(operators(module.graph)) == 2
    assert len(module.graph.find_nodes(op="call_function", target=torch.ops.aten.erf.default)) == 1


@pytest.mark.parametrize(
    ("function", "x"),
    [
        pytest.param(F.gelu, NUMBERS[0, :1024], id="few numbers"),
        pytest.param(F.gelu, NUMBERS.t(), id="not contiguous"),
        pytest.param(F.gelu, NUMBERS.float(), id="float32"),
        pytest.param(F.relu, NUMBERS, id="as fast as a table"),
        pytest.param(
            lambda x: torch.tanh(x.float() + torch.ones(1 << 16)).bfloat16(), NUMBERS, id="of two"
        ),
        pytest.param(lambda x: torch.tanh(x.float().sum(0)).bfloat16(), NUMBERS, id="of sums"),
        pytest.param(lambda x: torch.tanh(x.float()), NUMBERS, id="not rounded"),
    ],
)
def test_what_is_left_as_it_is(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    module = traced(function, x)
    before = [str(node.target) for node in module.graph.nodes]
    tabulated.tabulate(module.graph)
    assert [str(node.target) for node in module.graph.nodes] == before


def test_graphs_are_left_where_there_will_be_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tabulated, "has_kernels", lambda: False)
    module = traced(F.gelu, NUMBERS)
    tabulated.tabulate(module.graph)
    assert operators(module.graph) == []


def check_that_compiled_steps_are_the_same() -> None:
    weights = [torch.randn(512, 64), torch.randn(64, 512)]
    weights = [(weight / 8).requires_grad_() for weight in weights]
    x = torch.randn(2048, 64)

    def step(x: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, weights[0])), weights[1]).float().square().mean()

    results = []
    with hmpx.convert(device_types={"cpu"}, legalize="always"):
        for setting in ({}, {SETTING: None}):
            torch.compiler.reset()
            with torch._inductor.config.patch({"fx_graph_cache": False, **setting}):
                loss = torch.compile(step, fullgraph=True)(x)
                results.append([loss, *torch.autograd.grad(loss, weights)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_compiled_steps_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's code of a table is that of the tensor that it was for."""
    found = []
    tabulate = tabulated.tabulate

    def counted(graph: fx.Graph) -> None:
        tabulate(graph)
        found.extend(operators(graph))

    monkeypatch.setattr(tabulated, "tabulate", counted)
    contextvars.Context().run(check_that_compiled_steps_are_the_same)
    assert found == ["hmpx.looked_up.default", "hmpx.scaled.default"]


@pytest.mark.parametrize(("legalize", "is_set"), [("always", True), ("fast", False)])
def test_the_pass_is_there_while_the_conversion_holds(legalize: str, is_set: bool) -> None:
    entry = torch._inductor.config._config[SETTING]
    with hmpx.convert(device_types={"cpu"}, legalize=legalize):
        assert (entry.default is not None) is is_set
    assert entry.default is None


def test_what_is_compiled_to_run_without_hmpx_has_none_of_its_operators() -> None:
    entry = torch._inductor.config._config[SETTING]
    for is_artefact, expected in ((False, ["hmpx.looked_up.default"]), (True, [])):
        module = traced(F.gelu, NUMBERS)
        # What `convert` sets does not count in a thread with a setting of its own, as patches leave behind.
        settings = {"cpp_wrapper": is_artefact, "emulate_precision_casts": True}
        with (
            torch._inductor.config.patch(settings),
            hmpx.convert(device_types={"cpu"}, legalize="always"),
        ):
            entry.default(module.graph)
        assert operators(module.graph) == expected
