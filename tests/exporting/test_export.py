"""`hmpx.export`: an ONNX file whose nodes have the decided types, what it says of each, and what it refuses."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hmpx
from hmpx.cli import main
from hmpx.exporting import read_onnx, verify

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

FLOAT, FLOAT16, BFLOAT16 = 1, 10, 16  # onnx.TensorProto's codes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.norm(x + self.inner(x))
        logits = self.head(hidden)
        return logits, F.softmax(logits, -1)


@pytest.fixture
def block() -> Block:
    torch.manual_seed(0)
    return Block().eval()


def arrays(path: Path) -> dict[str, Any]:
    """Returns the stored weights by name."""
    return {
        each.name: onnx.numpy_helper.to_array(each) for each in onnx.load(path).graph.initializer
    }


@pytest.mark.parametrize("low", ["float16", "bfloat16"])
def test_nodes_have_the_types_of_the_lists_and_say_why(
    block: Block, tmp_path: Path, low: str
) -> None:
    found = hmpx.export(block, torch.randn(2, 8), tmp_path / "m.onnx", low_precision_type=low)
    assert found.faults == ()
    rows = [(n.op_type, n.dtype, n.op, n.module, n.reason.rpartition("/")[2]) for n in found.nodes]
    in_list = {
        name: f"{file}:{hmpx.explain(name).reason.rpartition(':')[2]}"
        for name, file in (
            ("linear", "bf16.txt"),
            ("add", "widest.txt"),
            ("layer_norm", "fp32.txt"),
            ("softmax", "fp32.txt"),
        )
    }
    assert rows == [
        ("Cast", low, "linear", "inner", in_list["linear"]),
        ("Gemm", low, "linear", "inner", in_list["linear"]),
        ("Cast", "float32", "add", "", in_list["add"]),
        ("Add", "float32", "add", "", in_list["add"]),
        ("LayerNormalization", "float32", "layer_norm", "norm", in_list["layer_norm"]),
        ("Cast", low, "linear", "head", in_list["linear"]),
        ("Gemm", low, "linear", "head", in_list["linear"]),
        ("Cast", "float32", "softmax", "", in_list["softmax"]),
        ("Softmax", "float32", "softmax", "", in_list["softmax"]),
    ]
    assert {node.location.rpartition(":")[0] for node in found.nodes} == {
        "tests/exporting/test_export.py"
    }
    assert found.stored == {low: 2 * (64 + 8 + 32 + 4), "float32": 4 * 16}
    # Weights keep their names, and are rounded to nearest.
    stored = arrays(tmp_path / "m.onnx")
    assert stored.keys() == dict(block.named_parameters()).keys()
    for name, each in block.named_parameters():
        dtype = "float32" if "norm" in name else low
        assert str(stored[name].dtype) == dtype
        expected = each.detach().to(getattr(torch, dtype)).float()
        assert torch.equal(torch.from_numpy(stored[name].astype("float32")), expected)


def test_large_weights_too(tmp_path: Path) -> None:
    """The exporter leaves casts of more than a million numbers to the engine."""
    model, path = nn.Linear(1100, 1000).eval(), tmp_path / "m.onnx"
    found = hmpx.export(model, torch.ones(1, 1100), path, low_precision_type="float16")
    assert found.stored == {"float16": 2 * 1000 * 1101}
    assert [node.op_type for node in found.nodes] == ["Cast", "Gemm", "Cast"]
    weight = torch.from_numpy(arrays(path)["weight"].copy())
    assert torch.equal(weight, model.weight.detach().half())


def test_large_weights_are_stored_low_before_views(tmp_path: Path) -> None:
    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(1_100_000))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            weight = self.weight.view(1000, 1100)
            return x @ weight.T, torch.mm(x[:, :1000], weight[:, :500])

    model, path = Viewed().eval(), tmp_path / "m.onnx"
    x = torch.randn(1, 1100)
    found = hmpx.export(model, x, path, low_precision_type="float16", verify=True)
    assert (found.faults, found.stored["float16"]) == ((), 2_200_000)
    assert "float32" not in found.stored
    assert torch.equal(
        torch.from_numpy(arrays(path)["weight"].copy()), model.weight.detach().half()
    )
    assert all((node.error or 0) <= 1 for node in found.nodes)


def test_a_weight_used_in_two_types_is_stored_in_both(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(4, 8)

        def forward(self, index: Tensor) -> Tensor:
            return F.linear(self.embedding(index), self.embedding.weight)

    found = hmpx.export(
        Tied().eval(), torch.tensor([1, 2]), tmp_path / "m.onnx", low_precision_type="float16"
    )
    assert found.stored == {"float16": 64, "float32": 128}
    assert {*arrays(tmp_path / "m.onnx")} == {"embedding.weight", "embedding.weight.float16"}


def test_outputs_are_fp32_unless_asked_otherwise(tmp_path: Path) -> None:
    model, x, path = nn.Linear(8, 4).eval(), torch.randn(2, 8), tmp_path / "m.onnx"
    with hmpx.convert(device_types={"cpu"}):
        hmpx.export(model, x, path)
        wide = onnx.load(path).graph.output[0]
        hmpx.export(model, x, path, outputs="keep")
        low = onnx.load(path).graph.output[0]
    assert (wide.type.tensor_type.elem_type, low.type.tensor_type.elem_type) == (FLOAT, BFLOAT16)
    assert wide.name == low.name


def test_arguments_by_name_and_any_batch(block: Block, tmp_path: Path) -> None:
    batch = torch.export.Dim("batch")
    path, shapes = tmp_path / "m.onnx", {"x": {0: batch}}
    hmpx.export(block, {"x": torch.randn(2, 8)}, path, dynamic_shapes=shapes)
    graph = onnx.load(path).graph
    assert [each.name for each in graph.input] == ["x"]
    assert graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


def test_a_policy_file_and_sections_decide(block: Block, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("low: [linear]\nsections:\n- module: head\n  fp32: [linear]\n")
    found = hmpx.export(block, torch.randn(2, 8), tmp_path / "m.onnx", policy=policy)
    types = {node.module: node.dtype for node in found.nodes if node.op_type == "Gemm"}
    assert types == {"inner": "bfloat16", "head": "float32"}
    reasons = {node.module: node.reason for node in found.nodes if node.op_type == "Gemm"}
    assert reasons["head"].endswith("policy.yaml:4")


def test_the_model_and_torch_are_as_before(block: Block, tmp_path: Path) -> None:
    before = {name: each.clone() for name, each in block.state_dict().items()}
    parameters = [*block.parameters()]
    hmpx.export(block, torch.randn(2, 8), tmp_path / "m.onnx")
    assert all(a is b for a, b in zip(block.parameters(), parameters, strict=True))
    assert all(torch.equal(each, before[name]) for name, each in block.state_dict().items())
    assert not hmpx.is_converted()
    assert torch.is_grad_enabled()
    assert [each.name for each in tmp_path.iterdir()] == ["m.onnx"]


def test_a_frozen_model_gives_the_same_file(block: Block, tmp_path: Path) -> None:
    x = torch.randn(2, 8)
    with hmpx.convert(low_precision_type="float16", device_types={"cpu"}):
        expected = hmpx.export(block, x, tmp_path / "m.onnx")
        stored = arrays(tmp_path / "m.onnx")
        frozen = hmpx.freeze(block, x)
        found = hmpx.export(block, x, tmp_path / "frozen.onnx")
        frozen.undo()
    assert [(n.op_type, n.dtype) for n in found.nodes] == [
        (n.op_type, n.dtype) for n in expected.nodes
    ]
    for name, each in arrays(tmp_path / "frozen.onnx").items():
        assert (each == stored[name]).all()


@pytest.mark.parametrize("low", ["float16", "bfloat16"])
def test_verified_ops_differ_by_roundoff(block: Block, tmp_path: Path, low: str) -> None:
    found = hmpx.export(
        block, torch.randn(2, 8), tmp_path / "m.onnx", low_precision_type=low, verify=True
    )
    errors = {node.op_type: node.error for node in found.nodes if node.op_type != "Cast"}
    assert errors.keys() == {"Gemm", "Add", "LayerNormalization", "Softmax"}
    ulps = {"Gemm": 1, "Add": 0}  # the others sum in float32 in another order
    assert all(error is not None and error <= ulps.get(op, 4) for op, error in errors.items())
    said = " ".join(str(found).split())
    assert "9 compared with torch, largest errors " in said
    assert f"ulps of {low} (" in said
    assert found.faults == ()


@pytest.mark.parametrize("value", [1.001, torch.nan, torch.inf])
def test_verification_finds_a_wrong_weight(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    export = torch.onnx.export

    def wrong(*args: Any, **kwargs: Any) -> Any:
        program: Any = export(*args, **kwargs)
        weight = program.model.graph.initializers["norm.weight"]
        weight.const_value = type(weight.const_value)(torch.full((8,), value), name="norm.weight")
        return program

    monkeypatch.setattr(torch.onnx, "export", wrong)
    found = hmpx.export(block, torch.randn(2, 8), tmp_path / "m.onnx", verify=True)
    errors = {node.op_type: node.error or 0 for node in found.nodes}
    assert errors["LayerNormalization"] > 1000
    assert max(error for op, error in errors.items() if op != "LayerNormalization") < 2
    (fault,) = found.faults
    assert fault.startswith("node_layer_norm (LayerNormalization, norm, ")
    assert "differs from torch by " in fault
    rows = json.loads(found.to_json())["nodes"]
    assert rows[0]["name"] == "node_layer_norm"
    table = str(found).split("\n\n")[2].splitlines()
    assert table[0].split()[-3:] == ["error", "in", "ulps"]
    assert table[1].startswith("LayerNo")


# --- what is wrong with a file -------------------------------------------------------------------


def saved(path: Path, nodes: list[Any], opset: int = 22, **types: int) -> str:
    """Writes a graph of these nodes; ``types`` are its values' types: inputs, and ``y``, the output."""
    value = {
        name: onnx.helper.make_tensor_value_info(name, code, [2, 2]) for name, code in types.items()
    }
    inputs = [each for name, each in value.items() if name != "y"]
    graph = onnx.helper.make_graph(nodes, "graph", inputs, [value["y"]])
    opsets = [onnx.helper.make_opsetid("", opset)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets), path)
    return str(path)


def node(op: str, inputs: str, output: str, name: str, **attributes: Any) -> Any:
    return onnx.helper.make_node(op, inputs.split(), [output], name=name, **attributes)


@pytest.mark.parametrize(
    ("nodes", "types", "opset", "expected"),
    [
        (
            [node("Add", "a b", "y", "sum")],
            {"a": FLOAT, "b": FLOAT16, "y": FLOAT},
            22,
            ["sum (Add): mixed inputs: float32 and float16"],
        ),
        (
            [node("Pow", "a b", "y", "power")],  # types of their own in the schema
            {"a": FLOAT16, "b": FLOAT, "y": FLOAT16},
            22,
            ["power (Pow): mixed inputs: float16 and float32"],
        ),
        (
            [node("Where", "a b c", "y", "choice")],
            {"a": 9, "b": FLOAT16, "c": FLOAT16, "y": FLOAT16},
            22,
            [],
        ),
        (
            [node("Conv", "a b", "y", "conv")],
            {"a": BFLOAT16, "b": BFLOAT16, "y": BFLOAT16},
            18,
            [
                "conv (Conv): Conv of opset 18 takes no bfloat16 as X",
                "conv (Conv): Conv of opset 18 takes no bfloat16 as W",
            ],
        ),
        (
            [node("Cast", "a", "b", "up", to=FLOAT), node("Cast", "b", "y", "down", to=FLOAT16)],
            {"a": FLOAT16, "y": FLOAT16},
            22,
            ["down (Cast): needless cast: up made float32 of float16"],
        ),
        (  # rounds
            [node("Cast", "a", "b", "down", to=FLOAT16), node("Cast", "b", "y", "up", to=FLOAT)],
            {"a": FLOAT, "y": FLOAT},
            22,
            [],
        ),
        (
            [
                node("Cast", "a", "b", "first", to=FLOAT16),
                node("Cast", "a", "c", "second", to=FLOAT16),
                node("Add", "b c", "y", "sum"),
            ],
            {"a": FLOAT, "y": FLOAT16},
            22,
            ["second (Cast): needless cast: first casts the same tensor to float16"],
        ),
        (
            [node("Cast", "a", "y", "same", to=FLOAT)],
            {"a": FLOAT, "y": FLOAT},
            22,
            ["same (Cast): needless cast: its input is float32 already"],
        ),
    ],
)
def test_faults_of_other_peoples_files(
    tmp_path: Path, nodes: list[Any], types: dict[str, int], opset: int, expected: list[str]
) -> None:
    path = saved(tmp_path / "m.onnx", nodes, opset, **types)
    assert [*read_onnx(path).faults] == expected


def test_mixed_inputs_inside_of_a_branch(tmp_path: Path) -> None:
    branch = onnx.helper.make_graph(
        [node("Mul", "a b", "inner", "product")],
        "branch",
        [],
        [onnx.helper.make_tensor_value_info("inner", FLOAT, [2, 2])],
    )
    choice = node("If", "flag", "y", "choice", then_branch=branch, else_branch=branch)
    path = saved(tmp_path / "m.onnx", [choice], flag=9, a=FLOAT, b=FLOAT16, y=FLOAT)
    assert "product (Mul): mixed inputs: float32 and float16" in read_onnx(path).faults


def test_branches_see_values_of_their_own(tmp_path: Path) -> None:
    """Names and casts of one branch say nothing about the other one."""

    def branch(name: str, code: int) -> Any:
        nodes = [
            node("Cast", "a", "t", f"{name} cast", to=code),
            node("Add", "t t", "s", f"{name} sum"),
            node("Cast", "s", name, f"{name} back", to=FLOAT),
        ]
        output = onnx.helper.make_tensor_value_info(name, FLOAT, [2, 2])
        return onnx.helper.make_graph(nodes, name, [], [output])

    for code in (FLOAT16, BFLOAT16):
        branches = {"then_branch": branch("x", FLOAT16), "else_branch": branch("z", code)}
        choice = node("If", "flag", "y", "choice", **branches)
        path = saved(tmp_path / "m.onnx", [choice], flag=9, a=FLOAT, y=FLOAT)
        assert read_onnx(path).faults == ()


def test_functions_of_a_file_are_inlined(tmp_path: Path) -> None:
    opsets = [onnx.helper.make_opsetid("", 22), onnx.helper.make_opsetid("own", 1)]
    body = [node("Cast", "a", "b", "cast", to=FLOAT16), node("Add", "a b", "c", "sum")]
    function = onnx.helper.make_function("own", "Sum", ["a"], ["c"], body, opsets[:1])
    path = saved(
        tmp_path / "m.onnx", [node("Sum", "x", "y", "call", domain="own")], x=FLOAT, y=FLOAT
    )
    model = onnx.load(path)
    model.functions.append(function)
    model.opset_import.append(opsets[1])
    onnx.save(model, path)
    (fault,) = read_onnx(path).faults
    assert fault.endswith("mixed inputs: float32 and float16")


def test_nodes_without_names(tmp_path: Path) -> None:
    nodes = [node("Cast", "a", each, "", to=FLOAT16) for each in ("b", "c")]
    path = saved(tmp_path / "m.onnx", [*nodes, node("Add", "b c", "y", "")], a=FLOAT, y=FLOAT16)
    assert read_onnx(path).faults == (
        "the node of c (Cast): needless cast: the node of b casts the same tensor to float16",
    )


def test_a_node_off_the_policy(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    hmpx.export(block, torch.randn(2, 8), path, low_precision_type="float16")
    model = onnx.load(path)
    softmax = next(each for each in model.graph.node if each.op_type == "Softmax")
    next(each for each in softmax.metadata_props if each.key == "hmpx.dtype").value = "float16"
    onnx.save(model, path)
    (fault,) = read_onnx(path).faults
    assert "computes in float32, and lists/hmpx/fp32.txt:" in fault
    assert fault.endswith("says float16")


def test_weights_that_are_infinite_are_named(tmp_path: Path) -> None:
    model = nn.Linear(2, 2).eval()
    with torch.no_grad():
        model.weight[0, 0] = float("inf")
    found = hmpx.export(model, torch.ones(1, 2), tmp_path / "m.onnx", low_precision_type="float16")
    assert found.faults == ("weight: holds infinities in float16",)


def test_masks_of_infinities_are_none(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.register_buffer("mask", torch.full((8, 8), -torch.inf).triu(1))

        def forward(self, x: Tensor) -> Tensor:
            return torch.baddbmm(self.mask, x, self.inner(x)).softmax(-1)

    model, x = Masked().eval(), torch.randn(2, 8, 8)
    found = hmpx.export(model, x, tmp_path / "m.onnx", low_precision_type="float16")
    assert found.faults == ()


# --- models that torch's exporter takes apart ----------------------------------------------------


class Chosen(nn.Module):
    """A branch, and a low output that one of its branches casts, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(300, 300)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x)

        def half(y: Tensor) -> Tensor:
            return self.inner(y.float() / 2).float()

        def double(y: Tensor) -> Tensor:
            return self.inner(y.float() * 2).float()

        return y, torch.cond(x.sum() > 0, double, half, (y,))


def test_branches_of_a_model(tmp_path: Path) -> None:
    model, x, path = Chosen().eval(), torch.randn(2, 300), tmp_path / "m.onnx"
    found = hmpx.export(model, x, path, low_precision_type="float16", verify=True)
    onnx.checker.check_model(str(path), full_check=True)
    assert found.faults == ()
    products = [each for each in found.nodes if each.op_type == "Gemm"]
    assert [each.dtype for each in products] == ["float16"] * 3
    choice = next(each.name for each in found.nodes if each.op_type == "If")
    assert {choice, *(each.name for each in products[1:])} <= {*found.not_compared}
    assert products[0].name not in found.not_compared
    assert f"not compared: {choice}, " in " ".join(str(found).split())
    assert found.stored["float16"] == 2 * 300 * 301
    assert "float32" not in found.stored or found.stored["float32"] < 100


def test_weights_that_are_outputs(tmp_path: Path) -> None:
    class Shown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(600, 600)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return self.inner(x), self.inner.weight, self.inner.bias.half()

    model, path = Shown().eval(), tmp_path / "m.onnx"
    for outputs in ("fp32", "keep"):
        hmpx.export(model, torch.ones(1, 600), path, outputs=outputs, low_precision_type="float16")
        onnx.checker.check_model(str(path), full_check=True)
        assert torch.equal(
            torch.from_numpy(arrays(path)["inner.weight"].copy()), model.inner.weight
        )


def test_folded_values_do_not_have_the_names_of_weights(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.scale.exp()

    hmpx.export(Scaled().eval(), torch.ones(1, 4), tmp_path / "m.onnx")
    assert "scale" not in arrays(tmp_path / "m.onnx")


def test_each_call_of_a_line_has_its_own_reason(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.mm(x, x), torch.mm(x.double(), x.double())

    found = hmpx.export(
        Twice().eval(), torch.randn(2, 2), tmp_path / "m.onnx", low_precision_type="float16"
    )
    reasons = {each.dtype: each.reason for each in found.nodes if each.op == "mm"}
    assert "fp64" not in reasons["float16"]
    assert "fp64" in reasons["float64"]


def test_ops_that_compute_in_fp32_on_request_are_no_fault(block: Block, tmp_path: Path) -> None:
    x, path = torch.randn(2, 8), tmp_path / "m.onnx"
    found = hmpx.export(block, x, path, low_precision_type="float16", legalize="always")
    assert found.faults == ()


# --- what is refused, and what stays -------------------------------------------------------------


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Autocast(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def refused(model: Any, path: Path, x: Any = None, **options: Any) -> str:
    path.write_text("earlier")
    with pytest.raises(hmpx.OptionError) as caught:
        hmpx.export(model, torch.ones(1, 2) if x is None else x, path, **options)
    assert path.read_text() == "earlier"
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert not hmpx.is_converted()
    return str(caught.value)


def test_errors_leave_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, linear = tmp_path / "m.onnx", nn.Linear(2, 2).eval()
    training = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval()
    training[1].train()
    assert "Sequential is in training mode (1)" in refused(training, path)
    assert "hmpx.export takes a torch.nn.Module, not function" in refused(F.relu, path)
    assert "torch.onnx.export can't export Branching" in refused(Branching().eval(), path)
    assert "outputs must be 'fp32' or 'keep'" in refused(linear, path, outputs="low")
    assert "did you mean 'low_precision_type'" in refused(linear, path, low_precision_typ="float16")
    float8 = refused(linear, path, low_precision_type="float8_e4m3fn")
    assert "float8_e4m3fn" in float8
    several = refused(linear, path, (torch.ones(1, 2), 3))
    assert "export called Linear(" in several
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        hmpx.export(linear, torch.ones(1, 3), path)
    assert path.read_text() == "earlier"
    assert "Autocast enters torch.autocast in its forward" in refused(Autocast(2, 2).eval(), path)
    assert not torch.is_autocast_enabled("cpu")
    assert "opset_version=99: torch exports" in refused(linear, path, opset_version=99)
    with pytest.raises(hmpx.OptionError, match=r"path must end in \.onnx"):
        hmpx.export(linear, torch.ones(1, 2), tmp_path / "m.json")
    with pytest.raises(hmpx.OptionError, match="can't write"):
        hmpx.export(linear, torch.ones(1, 2), "a\0.onnx")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "onnxscript", None)
        assert "pip install 'hmpx[onnx]'" in refused(linear, path)
    with pytest.raises(hmpx.OptionError, match=r"can't write .*: No such file or directory"):
        hmpx.export(linear, torch.ones(1, 2), tmp_path / "no" / "m.onnx")


def test_other_threads_may_enter_autocast(tmp_path: Path) -> None:
    """The check of the forward is for its own thread."""
    entered: list[bool] = []

    def other() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            entered.append(True)

    class Threaded(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.compiler.is_exporting():
                thread = threading.Thread(target=other)
                thread.start()
                thread.join()
            return super().forward(x)

    hmpx.export(Threaded(2, 2).eval(), torch.ones(1, 2), tmp_path / "m.onnx")
    assert entered == [True]


def test_links_permissions_and_pipes_stay(tmp_path: Path) -> None:
    linear, x = nn.Linear(2, 2).eval(), torch.ones(1, 2)
    target, link, pipe = tmp_path / "m.onnx", tmp_path / "link.onnx", tmp_path / "pipe.onnx"
    target.write_text("earlier")
    target.chmod(0o600)
    link.symlink_to(target)
    hmpx.export(linear, x, link)
    assert link.is_symlink()
    assert read_onnx(target).faults == ()
    assert target.stat().st_mode & 0o777 == 0o600
    os.mkfifo(pipe)
    with pytest.raises(hmpx.OptionError, match="not a regular file"):
        hmpx.export(linear, x, pipe)
    with pytest.raises(hmpx.OptionError, match="a pipe or a device"):
        read_onnx(pipe)


def test_a_full_disk_leaves_the_earlier_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(self: Any, destination: Path, **options: Any) -> None:
        Path(destination).write_text("half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.onnx.ONNXProgram, "save", save)
    assert refused(nn.Linear(2, 2).eval(), tmp_path / "m.onnx").endswith("No space left on device")


def test_weights_in_a_file_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch writes models of more than 2 GB."""
    save = torch.onnx.ONNXProgram.save
    monkeypatch.setattr(
        torch.onnx.ONNXProgram,
        "save",
        lambda self, destination: save(self, destination, external_data=True),
    )
    model, path = nn.Linear(64, 64).eval(), tmp_path / "m.onnx"
    with torch.no_grad():
        model.weight[0, 0] = float("inf")
    found = hmpx.export(model, torch.randn(2, 64), path, low_precision_type="float16")
    assert {each.name for each in tmp_path.iterdir()} == {"m.onnx", "m.onnx.data"}
    assert found.stored == {"float16": 2 * 64 * 65}
    assert found.faults == ("weight: holds infinities in float16",)
    (tmp_path / "m.onnx.data").unlink()
    (fault,) = read_onnx(path).faults
    assert fault.startswith("weight: its values can't be read: ")
    assert "m.onnx.data" in fault


def test_nodes_that_no_engine_takes(tmp_path: Path) -> None:
    for bad in (node("Cast", "", "y", "cast", to=FLOAT), node("Cast", "a", "y", "cast", to=99)):
        path = saved(tmp_path / "m.onnx", [bad], a=FLOAT, y=99)
        with pytest.raises(hmpx.OptionError, match=r"m\.onnx is not a readable ONNX model"):
            read_onnx(path)


@pytest.mark.parametrize("content", [b"", b"low: [linear]\n", b"\x08\x07\x12" * 9])
def test_what_is_not_a_model(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(hmpx.OptionError, match=r"m\.onnx is not a readable ONNX model"):
        read_onnx(path)


# --- the command line ----------------------------------------------------------------------------

PROGRAM = """
import torch

def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Softmax(-1)).eval()

def inputs():
    return torch.ones(2, 8)
"""


def test_commands_export_and_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("exported_program.py").write_text(PROGRAM)
    command = ["export", "exported_program.py:build", "--low-precision-type", "float16"]
    files = ["--json", "m.json", "--html", "m.html", "--csv", "m.csv"]
    assert main([*command, "--device-types", "cpu", "--onnx", "m.onnx", *files]) == 0
    said = capsys.readouterr().out
    assert "m.onnx: 4 nodes, no faults" in said
    assert [each["dtype"] for each in json.loads(Path("m.json").read_text())["nodes"]] == [
        *("float16", "float16"),
        *("float32", "float32"),
    ]
    assert "Types of m.onnx" in Path("m.html").read_text()
    assert main(["check", "m.onnx"]) == 0
    assert "m.onnx: 4 nodes, no faults" in capsys.readouterr().out
    bad = saved(Path("bad.onnx"), [node("Add", "a b", "y", "sum")], a=FLOAT, b=FLOAT16, y=FLOAT)
    assert main(["check", "m.onnx", bad]) == 1
    assert "sum (Add): mixed inputs" in capsys.readouterr().out
    assert main(["check", "m.onnx", "--html", "c.html", "--json", "c.json", "--csv", "c.csv"]) == 0
    assert json.loads(Path("c.json").read_text())["nodes"][1]["op_type"] == "Gemm"
    assert "Types of m.onnx" in Path("c.html").read_text()
    for wrong in (
        ["m.onnx", "policy.yaml"],
        ["m.onnx", bad, "--json", "c.json"],
        ["a.txt", "--csv", "a.csv"],
    ):
        with pytest.raises(SystemExit):
            main(["check", *wrong])


class Beyond(nn.Module):
    """Weights, a transposed parameter and a number that float16 can't hold."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.small, self.large = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(1100, 1000)
        self.table = nn.Parameter(torch.randn(8, 8))
        with torch.no_grad():
            self.inner.weight[0, 0], self.large.weight[3, 3] = 1e5, 1e6
            self.table[1, 1] = -7e4

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        hidden = self.inner(x) * 1e-3
        return (
            hidden + x,
            x @ self.table.T,
            self.large(y),
            self.small(x) * 1e5,
            hidden.relu(),
        )


def test_weights_and_numbers_beyond_float16_stay_fp32(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = Beyond().eval(), tmp_path / "m.onnx"
    inputs = torch.randn(2, 8) * 0.01, torch.randn(2, 1100) * 0.01
    found = hmpx.export(model, inputs, path, low_precision_type="float16", verify=True)
    assert found.faults == ()
    named = {
        line.rpartition(": ")[2].removesuffix(" is beyond float16") for line in found.kept_wide
    }
    assert named >= {"inner.weight", "table", "large.weight"}
    assert read_onnx(path).kept_wide == found.kept_wide
    assert all(line in str(found).replace("\n", " ") for line in found.kept_wide)
    assert {node.dtype for node in found.nodes if "beyond" in node.reason} == {"float32"}
    assert all(node.error is None or node.error <= 2 for node in found.nodes)
    got = onnx.reference.ReferenceEvaluator(str(path)).run(
        None, dict(zip(("x", "y"), (each.numpy() for each in inputs), strict=True))
    )
    with torch.no_grad():
        expected = model(*inputs)
    for each, want in zip(got, expected, strict=True):
        assert torch.allclose(
            torch.from_numpy(each), want, rtol=4e-3, atol=4e-3 * float(want.abs().max())
        )


class Moved(nn.Module):
    """One weight beyond float16 reaches a product, in ``kind``'s way."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.table, self.linear = kind, nn.Embedding(8, 4), nn.Linear(4, 3)
        self.recurrent = {"GRU": nn.GRU, "LSTM": nn.LSTM}.get(kind, nn.RNN)(4, 5, batch_first=True)
        self.weight, self.other = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(2, 4))
        with torch.no_grad():
            self.table.weight[0, 0] = self.weight[0, 0] = 7e4
            if kind == "GRU":
                self.recurrent.weight_ih_l0[0, 0] = 7e4
            self.recurrent.bias_ih_l0[0] = -7e4

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "embedding":
            return torch.as_tensor(self.linear(self.table(x)))
        if self.kind == "cat":
            return F.linear(x, torch.cat([self.other, self.weight]))
        if self.kind == "pad":
            return F.linear(x, F.pad(self.weight, (1, 1))[:, 1:-1].clone())
        return torch.as_tensor(self.recurrent(x)[0])


@pytest.mark.filterwarnings("ignore:The tensor attributes")
@pytest.mark.parametrize("kind", ["embedding", "cat", "pad", "GRU", "LSTM"])
def test_moved_weights_beyond_float16_stay_fp32(kind: str, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model, path = Moved(kind).eval(), tmp_path / "m.onnx"
    x = torch.arange(6).view(2, 3) if kind == "embedding" else torch.randn(2, 3, 4) * 0.1
    found = hmpx.export(model, x, path, low_precision_type="float16", verify=True)
    assert found.faults == ()
    assert found.kept_wide
    assert all(node.error is None or node.error <= 2 for node in found.nodes)
    if kind == "cat":  # only casts are compared
        again = verify(path, model, x, low_precision_type="float16")
        assert {node.error for node in found.nodes} == {None, 0}
        assert [node.error for node in again.nodes] == [node.error for node in found.nodes]
    session = runtime.InferenceSession(path)
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        expected = model(x)
    assert torch.allclose(
        torch.from_numpy(got), expected, rtol=4e-3, atol=4e-3 * float(expected.abs().max())
    )


def test_mixed_inputs_beside_wide_weights_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where ONNX can't tell the types of a graph's values."""
    path = tmp_path / "m.onnx"
    path.write_bytes(b"earlier")
    common = importlib.import_module("onnx_ir.passes.common")
    monkeypatch.setattr(
        common.ShapeInferencePass, "call", lambda self, model: common.NameFixPass()(model)
    )
    with pytest.raises(hmpx.OptionError, match=r"mixed inputs.*table\.weight is beyond float16"):
        hmpx.export(
            Moved("embedding").eval(), torch.ones(1, 2, dtype=torch.long), path,
            low_precision_type="float16", verify=True,
        )  # fmt: skip
    assert [each.name for each in tmp_path.iterdir()] == ["m.onnx"]
    assert path.read_bytes() == b"earlier"


def test_a_finished_file_is_compared(
    block: Block,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    path, x = tmp_path / "m.onnx", torch.randn(2, 8)
    hmpx.export(block, x, path, low_precision_type="float16")
    model = onnx.load(path)
    (weight,) = [each for each in model.graph.initializer if each.name == "norm.weight"]
    weight.CopyFrom(onnx.numpy_helper.from_array(numpy.full(8, 1.01, "f4"), "norm.weight"))
    onnx.save(model, path)
    content = path.read_bytes()
    found = verify(path, block, x, low_precision_type="float16")
    assert path.read_bytes() == content
    errors = {node.op_type: node.error or 0 for node in found.nodes}
    assert errors["LayerNormalization"] > 1000
    assert max(error for op, error in errors.items() if op != "LayerNormalization") < 2
    with pytest.raises(hmpx.OptionError, match=r"hmpx check FILE\.onnx --model"):
        hmpx.export(block, x, path, verify="file")  # type: ignore[arg-type]
    Path("finished_program.py").write_text(PROGRAM)
    with pytest.raises(SystemExit):
        main(["export", "finished_program.py:build", "--verify-file"])
    assert "hmpx check FILE.onnx --model FILE.py:FUNCTION" in capsys.readouterr().err
    other = saved(tmp_path / "o.onnx", [node("Relu", "x", "y", "relu")], x=FLOAT, y=FLOAT)
    inputs = "x: float32[2, 2]; the given one is float32[2, 8]"
    with pytest.raises(hmpx.OptionError, match=re.escape(inputs)):
        verify(other, block, x)
    with pytest.raises(hmpx.OptionError, match="no value with a name of this model's"):
        verify(
            saved(Path(other), [node("Relu", "input", "y", "relu")], input=FLOAT, y=FLOAT),
            *(nn.Linear(2, 2).eval(), torch.ones(2, 2)),
        )
    with pytest.raises(hmpx.OptionError, match=r"none\.onnx"):
        verify(tmp_path / "none.onnx", block, x)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_the_command_compares_a_file_with_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of torch's exporter in float32, which the policy wants low, has errors of half an ulp at most."""
    monkeypatch.chdir(tmp_path)
    program = "checked_program"
    Path(f"{program}.py").write_text(
        PROGRAM + "\ndef wrong():\n    return torch.ones(2, 8).double()\n"
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Softmax(-1)).eval()  # of PROGRAM
    torch.onnx.export(model, (torch.ones(2, 8),), "m.onnx", dynamo=True, verbose=False)
    given = ["--model", f"{program}.py:build", "--device-types", "cpu"]
    lists = ["--low-precision-type", "float16", "--bf16", "low.txt"]
    Path("low.txt").write_text("linear\n")
    assert main(["check", "m.onnx", *given, *lists, "--json", "m.json", "--html", "m.html"]) == 0
    errors = [each["error"] for each in json.loads(Path("m.json").read_text())["nodes"]]
    assert errors == sorted(errors, reverse=True)
    assert 0 < errors[0] <= 0.5
    assert "error in ulps" in Path("m.html").read_text()
    assert "2 compared with torch" in " ".join(capsys.readouterr().out.split())
    assert main(["check", "m.onnx", *given, "--inputs", "wrong"]) == 2
    said = capsys.readouterr().err
    assert "float32[2, 8]" in said
    for wrong in (
        ["m.onnx", "m.onnx", *given],
        ["m.onnx", "--inputs", "inputs"],
        ["low.txt", *lists],
        ["m.onnx", *given, *lists, "--bf16", "low.txt"],
    ):
        with pytest.raises(SystemExit):
            main(["check", *wrong])
