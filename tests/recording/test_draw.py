"""Drawings of autograd graphs: nodes, casts, dtypes, modules, and what they leave out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import hmpx
from hmpx import Drawing, OptionError, compute
from hmpx.recording import Node


class Small(nn.Module):
    """A linear layer and a softmax, in fp32 by the lists."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(self.fc(x), -1)


def of(drawing: Drawing, kind: str) -> list[Node]:
    return [node for node in drawing.nodes if node.kind == kind]


def labels(nodes: Iterable[Node]) -> list[str]:
    return [node.label for node in nodes]


def arrows(drawing: Drawing) -> set[tuple[str, str]]:
    """Returns the edges by label."""
    names = {node.id: node.label for node in drawing.nodes}
    return {(names[edge.source], names[edge.target]) for edge in drawing.edges}


X = torch.linspace(-1, 1, 64 * 64).view(64, 64)


@pytest.mark.parametrize("legalize", ["never", "always"])
def test_a_model_has_the_casts_that_the_policy_asks_for(legalize: str) -> None:
    """And no others: what legalizing adds is part of the op."""
    model = Small()
    with hmpx.convert(device_types={"cpu"}, legalize=legalize):
        drawing = hmpx.draw(model, X)
    weight, softmax = of(drawing, "cast")
    assert (weight.label, weight.dtype, weight.module) == ("fp32 -> bf16", "bf16", "fc")
    assert (softmax.label, softmax.dtype, softmax.module) == ("bf16 -> fp32", "fp32", "")
    linear, last = of(drawing, "op")
    assert (linear.label, linear.dtype, linear.module) == ("linear", "bf16", "fc")
    assert linear.shape == (64, 32)
    assert linear.is_legalized is (legalize == "always")
    assert re.fullmatch(r"lists/hmpx/bf16.txt:\d+", linear.reason)
    assert re.search(r"test_draw.py:\d+$", last.location)
    assert (last.label, last.dtype) == ("softmax", "fp32")
    (parameter,) = of(drawing, "parameter")
    assert (parameter.label, parameter.shape, parameter.dtype) == ("fc.weight", (32, 64), "fp32")
    assert arrows(drawing) == {
        ("fc.weight", "fp32 -> bf16"),
        ("fp32 -> bf16", "linear"),
        ("linear", "bf16 -> fp32"),
        ("bf16 -> fp32", "softmax"),
        ("softmax", "output"),
    }
    assert drawing.classes["fc"] == "Linear"


@pytest.mark.usefixtures("fresh_wrappers")
def test_a_result_is_drawn_with_the_names_of_a_model() -> None:
    """Afterwards: modules are those of the parameters around an op."""
    model = Small()
    with hmpx.convert(device_types={"cpu"}, legalize="never"):
        loss = model(X).sum()
    drawing = hmpx.draw(loss, model=model)
    product = "mm" if compute.nodes_in_use().module is None else "linear"  # compiled as one node
    assert [(n.label, n.dtype, n.module) for n in of(drawing, "op")] == [
        (product, "bf16", "fc"),
        ("softmax", "fp32", ""),
        ("sum", "fp32", ""),
    ]
    assert labels(of(drawing, "cast")) == ["fp32 -> bf16", "bf16 -> fp32"]
    assert labels(of(drawing, "parameter")) == ["fc.weight"]
    assert labels(of(hmpx.draw(loss), "input")) == ["input"]
    named = hmpx.draw(loss, params={"w": model.fc.weight})
    assert labels(of(named, "parameter")) == ["w"]
    assert named == hmpx.draw(loss, params=[("w", model.fc.weight)])


def test_a_number_format_has_its_name() -> None:
    """Ops in it are emulated."""
    with hmpx.convert(device_types={"cpu"}, low_precision_type="float8_e4m3fn"):
        drawing = hmpx.draw(Small(), X)
    linear, softmax = of(drawing, "op")
    assert (linear.dtype, linear.is_legalized) == ("float8_e4m3fn", True)
    assert softmax.dtype == "fp32"
    assert labels(of(drawing, "cast")) == ["fp32 -> float8_e4m3fn"]
    assert drawing.formats == {"float8_e4m3fn"}


def test_a_model_is_drawn_without_a_conversion() -> None:
    """By autograd's names, in fp32."""
    drawing = hmpx.draw(Small(), X)
    assert [(n.label, n.dtype, n.module) for n in of(drawing, "op")] == [
        ("mm", "fp32", "fc"),
        ("softmax", "fp32", ""),
    ]
    assert of(drawing, "cast") == []


class Residual(nn.Module):
    """Two blocks that add to what they take."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def test_ops_are_in_the_modules_that_call_them() -> None:
    """Also those without parameters; a loss is outside of the model."""
    model, x = Residual(), torch.ones(3, 8)
    loss = nn.MSELoss()
    with hmpx.convert(device_types={"cpu"}, legalize="never"):
        drawing = hmpx.draw(lambda: loss(model(x), x), model=model)
    assert [(n.label, n.module) for n in of(drawing, "op") if "norm" not in n.label] == [
        ("linear", "blocks.0.1"),
        ("gelu", "blocks.0.2"),
        ("add", ""),
        ("linear", "blocks.1.1"),
        ("gelu", "blocks.1.2"),
        ("add", ""),
        ("mse_loss", ""),
    ]
    assert drawing.classes["blocks.1.1"] == "Linear"


def test_views_are_part_of_edges_and_matmul_is_one_node() -> None:
    """Views between ops, and what matmul of stacks does inside."""
    x = torch.ones(2, 3, 8, 16, requires_grad=True)

    def scores() -> Tensor:
        q = torch.relu(x).transpose(1, 2)
        return q @ q.transpose(-2, -1)

    with hmpx.convert(device_types={"cpu"}, legalize="never"):
        drawing = hmpx.draw(scores)
    assert [(n.label, n.shape) for n in of(drawing, "op")] == [
        ("relu", (2, 3, 8, 16)),
        ("matmul", (2, 8, 3, 3)),
    ]


def test_a_graph_is_cut_at_its_far_end() -> None:
    """Those nearest to the result are drawn."""
    model = Small()
    drawing = hmpx.draw(model(X).exp(), model=model, max_nodes=2)
    assert labels(drawing.nodes) == ["2 more nodes; max_nodes=2", "softmax", "exp", "output"]
    assert drawing.left_out == 2


def test_outputs_are_found_in_any_structure() -> None:
    """Each has its place; those without a graph are none."""
    x = torch.ones(2, requires_grad=True)
    y, z = torch.sin(x), torch.cos(x)
    drawing = hmpx.draw({"a": [y, (z, 3)], "b": torch.ones(1), "c": y})
    assert labels(of(drawing, "output")) == ["output['a'][0]", "output['a'][1][0]"]


class Doubled(torch.autograd.Function):
    """A function of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_functions_checkpoints_and_compiled_graphs_are_nodes() -> None:
    """A checkpoint that keeps its graph is drawn as any other."""
    x = torch.ones(1, 2, requires_grad=True)
    assert labels(of(hmpx.draw(Doubled.apply(x)), "op")) == ["Doubled"]
    run = torch.utils.checkpoint.checkpoint
    assert labels(of(hmpx.draw(run(torch.sin, x, use_reentrant=True)), "op")) == ["checkpoint"]
    assert labels(of(hmpx.draw(run(torch.sin, x, use_reentrant=False)), "op")) == ["sin"]


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_model_is_drawn_as_it_is_written() -> None:
    """If draw calls it; of a result there is only the compiled graph."""
    model = Small()
    compiled = torch.compile(model, backend="aot_eager")
    with hmpx.convert(device_types={"cpu"}, legalize="never"):
        assert labels(of(hmpx.draw(compiled, X), "op")) == ["linear", "softmax"]
        assert labels(of(hmpx.draw(compiled(X)), "op")) == ["compiled graph"]


def test_gradients_are_recorded_for_the_call() -> None:
    """Also under no_grad; hooks and observers are gone afterwards."""
    model = Small()
    with torch.no_grad():
        drawing = hmpx.draw(model, X)
        assert not torch.is_grad_enabled()
    assert len(of(drawing, "op")) == 2
    assert not model.fc._forward_hooks and not model.fc._forward_pre_hooks
    assert hmpx.observers.ATTACHED.value == ()


LEAF = torch.ones(1, requires_grad=True)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((torch.ones(1),), {}, "output has no autograd graph: no tensor in it requires gradients"),
        (([torch.ones(1)],), {}, "compute it outside of torch.no_grad()"),
        ((LEAF,), {}, "output has no autograd graph: it is a leaf; draw what is computed from it"),
        ((lambda: torch.ones(1),), {}, "the result of the call has no autograd graph: none of its"),
        ((3,), {}, "draw takes a tensor, tensors in a dict, list or tuple, or a model, not 3"),
        ((LEAF * 2, 1), {}, "inputs are for a model or a function to call, not for tensor("),
        ((LEAF * 2,), {"model": 3}, "model must be a torch.nn.Module, not 3"),
        ((LEAF * 2,), {"max_nodes": 0}, "max_nodes must be an int of at least 1, not 0"),
        ((LEAF * 2,), {"params": {"a": 3}}, "params must be a dict of names to tensors, not {"),
        ((LEAF * 2,), {"params": 3}, "params must be a dict of names to tensors, not 3"),
    ],
)
def test_errors_say_what_to_do(
    arguments: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError) as raised:
        hmpx.draw(*arguments, **options)
    assert message in str(raised.value)
