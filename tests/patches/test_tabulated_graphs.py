"""Graphs that are hard to look up: values, layouts, and that they still compile."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.codegen.cpp
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

import hmpx
from hmpx.patches import tabulated
from tests.patches.traced_graphs import NUMBERS, SETTING, operators, traced

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("fresh_dynamo"),
]

IMAGES = NUMBERS.view(8, 16, 64, 64)

Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def kernels_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tabulated, "has_kernels", lambda: True)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators in graphs that are compiled."""
    found: list[str] = []
    tabulate = tabulated.tabulate

    def counting(graph: fx.Graph) -> None:
        tabulate(graph)
        found.extend(operators(graph))

    monkeypatch.setattr(tabulated, "tabulate", counting)
    return found


def check_equal(found: Any, expected: Any) -> None:
    """Checks all bits and strides; NaNs have many bits."""
    for a, b in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert torch.equal(a.isnan(), b.isnan())
        bits = {2: torch.int16, 4: torch.int32}[a.element_size()]
        a_bits, b_bits = (each.view(bits).masked_fill(each.isnan(), 0) for each in (a, b))
        assert torch.equal(a_bits, b_bits)


def low(x: Tensor) -> Tensor:
    return x.bfloat16()


def same_text(x: Tensor) -> list[Tensor]:
    """Functions whose ops have arguments that look alike: a number, and that of a formula."""
    x = x.float()
    y = x * x
    return [low(torch.erf(each)) for each in (y, x * -1, x + x, x + -1, x * y, x * 0, x * 1, x * 2)]


def looked_up_twice(x: Tensor) -> list[Tensor]:
    y = low(torch.tanh(x.float()))
    z = low(torch.erf(y.float()) * 3)
    return [z, low(torch.log1p(z.float()))]


def factors_looked_up(gradient: Tensor, x: Tensor) -> Tensor:
    y = low(torch.tanh(gradient.float()))
    return low(y.float() * torch.erf(low(torch.tanh(x.float())).float()))


def reordered(x: Tensor) -> Tensor:
    return low(torch.tanh(x.float()).contiguous(memory_format=torch.channels_last))


def reordered_first(x: Tensor) -> Tensor:
    return low(torch.tanh(x.float().contiguous(memory_format=torch.channels_last)))


FLIPPED = NUMBERS.flip(1)

GRAPHS: dict[str, tuple[Function, tuple[Tensor, ...], list[str]]] = {
    "arguments of equal text": (same_text, (NUMBERS,), ["hmpx.looked_up.default"] * 8),
    "one looked up in what another found": (
        looked_up_twice,
        (NUMBERS,),
        ["hmpx.looked_up.default"] * 3,
    ),
    "factors and numbers looked up": (
        factors_looked_up,
        (NUMBERS, FLIPPED),
        ["hmpx.looked_up.default", "hmpx.looked_up.default", "hmpx.scaled.default"],
    ),
    "times float64": (
        lambda g, x: low(g.float() * torch.tanh(x.double())),
        (NUMBERS, FLIPPED),
        [],
    ),
    "times float64 of float32": (
        lambda g, x: low(g.float() * torch.tanh(x.float().double())),
        (NUMBERS, FLIPPED),
        [],
    ),
    "times bfloat16": (
        lambda g, x: low(g.float() * low(torch.tanh(x.float()))),
        (NUMBERS, FLIPPED),
        ["hmpx.looked_up.default"],
    ),
    "times booleans": (
        lambda g, x: low(g.float() * (torch.tanh(x.float()) > 0.5)),
        (NUMBERS, FLIPPED),
        [],
    ),
    "times float32": (lambda g, x: low(g * torch.tanh(x.float())), (FLIPPED.float(), NUMBERS), []),
    "times a function of another": (
        lambda g, x: low(torch.erf(g.float()) * torch.tanh(x.float())),
        (NUMBERS, FLIPPED),
        [],
    ),
    "times one row": (
        lambda g, x: low(g.float() * torch.tanh(x.float())),
        (FLIPPED[0], NUMBERS),
        [],
    ),
    "rounded to float16": (lambda x: torch.tanh(x.float()).half(), (NUMBERS,), []),
    "of elements elsewhere": (
        lambda x: [low(torch.erf(each)) for each in (x.float().flip(1), x.float().cumsum(1))],
        (NUMBERS,),
        [],
    ),
    "of which a mask is one function": (
        lambda x, y: low(torch.tanh(x.float()).masked_fill(y > 0, 1)),
        (NUMBERS, FLIPPED),
        [],
    ),
    "an order in memory of four dimensions": (
        lambda x: low(torch.tanh(x.float()).clone(memory_format=torch.channels_last)),
        (NUMBERS.view(-1, 1, 1, 1),),
        [],
    ),
    "another order in memory": (reordered, (IMAGES,), []),
    "another order in memory before": (reordered_first, (IMAGES,), []),
    "a long way between rows that are one": (
        F.gelu,
        (NUMBERS.view(-1).as_strided((512, 1, 1024), (1024, 7, 1)),),
        [],
    ),
    "negated by a flag": (
        lambda x: F.gelu(torch._neg_view(x)),
        (NUMBERS,),
        ["hmpx.looked_up.default"],
    ),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_compute_what_they_did(name: str) -> None:
    function, inputs, expected_operators = GRAPHS[name]
    module = traced(function, *inputs)
    expected = module(*inputs)
    tabulated.tabulate(module.graph)
    module.graph.lint()
    module.recompile()
    assert sorted(operators(module.graph)) == sorted(expected_operators)
    check_equal(module(*inputs), expected)


@pytest.fixture
def jitter() -> Iterator[Function]:
    """A user's op of each element and a random number."""
    library = torch.library.Library("of_a_test", "DEF")
    tags = (torch.Tag.pointwise, torch.Tag.nondeterministic_seeded)
    library.define("jitter(Tensor x) -> Tensor", tags=tags)
    library.impl("jitter", lambda x: x + torch.rand(x.shape), "CPU")
    torch.library.register_fake("of_a_test::jitter", torch.empty_like, lib=library)
    yield torch.ops.of_a_test.jitter.default
    library._destroy()


def test_random_numbers_are_drawn_for_each_element(jitter: Function) -> None:
    def function(x: Tensor) -> list[Tensor]:
        y = x.float()
        chances = torch.sigmoid(y)
        random = [
            jitter(y),
            torch.rand_like(y),
            torch.bernoulli(chances),
            F.rrelu(y, training=True),
        ]
        return [low(torch.tanh(each)) for each in [*random, F.dropout(y)]]

    x = torch.randn(NUMBERS.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    module = traced(function, x)
    torch.manual_seed(0)
    expected = module(x)
    tabulated.tabulate(module.graph)
    module.recompile()
    torch.manual_seed(0)
    check_equal(module(x), expected)
    assert operators(module.graph) == []


def test_sizes_that_are_not_known_are_no_obstacle() -> None:
    module = traced(
        lambda x: F.gelu(x) + F.gelu(x[:512]).sum(), NUMBERS.view(1024, 512), mode="symbolic"
    )
    before = [str(node.target) for node in module.graph.nodes]
    tabulated.tabulate(module.graph)
    assert [str(node.target) for node in module.graph.nodes] == before


def check_that_graphs_that_need_not_round_are_left() -> None:
    entry = torch._inductor.config._config[SETTING]
    with hmpx.convert(device_types={"cpu"}, legalize="always"):
        for rounds, expected in ((True, ["hmpx.looked_up.default"]), (False, [])):
            module = traced(F.gelu, NUMBERS)
            with torch._inductor.config.patch(emulate_precision_casts=rounds):
                entry.default(module.graph)
            assert operators(module.graph) == expected


def test_graphs_that_need_not_round_are_left() -> None:
    """Where inductor may leave out the rounding of what is looked up, values would differ."""
    contextvars.copy_context().run(check_that_graphs_that_need_not_round_are_left)


def hard_to_compile(x: Tensor, odd: Tensor) -> list[Tensor]:
    y = x.float()
    infinite = low(torch.tanh(y + float("inf")))
    none = low(torch.tanh(y) * float("nan"))
    twice = low(torch.erf(infinite.float()))
    dropped = F.dropout(low(torch.erf(y)), 0.25)
    return [
        infinite,
        none,
        twice,
        dropped,
        F.gelu(odd),
        F.mish(odd).t(),
        low(torch.tanh(y)).view(-1)[1:],
    ]


def check_that_compiled_graphs_are_the_same(function: Function, inputs: tuple[Tensor, ...]) -> None:
    results = []
    with hmpx.convert(device_types={"cpu"}, legalize="always"):
        for setting in ({}, {SETTING: None}):
            torch.compiler.reset()
            torch.manual_seed(0)
            with torch._inductor.config.patch({"fx_graph_cache": False, **setting}):
                results.append(torch.compile(function, fullgraph=True)(*inputs))
    check_equal(*results)


def test_what_inductor_finds_hard_compiles(counted: list[str]) -> None:
    inputs = (NUMBERS, torch.randn(40_003, 17).bfloat16())
    contextvars.Context().run(check_that_compiled_graphs_are_the_same, hard_to_compile, inputs)
    assert counted == ["hmpx.looked_up.default"] * 7
