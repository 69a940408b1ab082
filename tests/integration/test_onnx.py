"""ONNX artefacts: casts are Cast nodes in the graph; no runtime needs hmpx (pytorch #72494)."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hmpx

np = pytest.importorskip("numpy")
onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

BF16, FP16 = torch.bfloat16, torch.float16
LOW = "LOW"  # in the tables: the type that the model was exported for

#: ONNX's names of the low types.
ONNX_TYPES = {BF16: "BFLOAT16", FP16: "FLOAT16"}

#: In low precision, weights near 64 lose what tells them apart: bf16 has a spacing of 1/2 there,
#: fp16 of 1/16. Inputs that add up to 0 cancel the 64, so the casts are seen in the result.
OFFSET = 64


class Perceptron(nn.Module):
    """A norm, an activation and a softmax between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:  # x: [batch, 8]
        return F.softmax(self.last(F.gelu(self.norm(self.first(x)))), -1)


class Convolutions(nn.Module):
    """A small image classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.last = nn.Conv2d(8, 8, 3, stride=2), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:  # x: [batch, 3, height, width]
        hidden = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        return F.log_softmax(self.last(self.second(hidden).mean((2, 3))), -1)


class Norms(nn.Module):
    """What torch computes in one kernel from a bf16 input and fp32 weights, and ONNX does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(4, 4, 1)
        self.group, self.instance = nn.GroupNorm(2, 4), nn.InstanceNorm1d(4, affine=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # x: [batch, 4, 6]
        hidden = self.first(x)
        return self.group(hidden).float(), self.instance(hidden).float()


class Attention(nn.Module):
    """Two heads of attention with a float mask, and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # x: [batch, tokens, 8]
        batch, tokens, width = x.shape
        q, k, v = self.first(x).view(batch, tokens, 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.last(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Region(nn.Module):
    """The same product cast and, in a region of its own, uncast."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 4, bias=False)
        # Multiples of 1/64 below 65: sums of eight are exact in fp32, as are the rounded ones.
        self.first.weight = nn.Parameter(torch.randint(0, 64, (4, 8)) / 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # x: [batch, 8]
        cast = self.first(x)
        with hmpx.disable_casts():
            uncast = self.first(x)
        return cast.float(), uncast


@dataclass(frozen=True)
class Case:
    """A model, its input, and what its nodes compute in."""

    model: type[nn.Module]
    shape: tuple[int, ...]
    #: Names of the first axes: those that may have any size.
    dynamic: tuple[str, ...]
    #: The axis that the first layer sums over.
    summed: int
    #: ONNX op -> the types of its nodes' inputs and outputs.
    types: dict[str, set[str]]


CASES = {
    "perceptron": Case(
        Perceptron,
        (3, 8),
        ("batch",),
        1,
        {"Gemm": {LOW}, "LayerNormalization": {"FLOAT"}, "Gelu": {"FLOAT"}, "Softmax": {"FLOAT"}},
    ),
    "convolutions": Case(
        Convolutions,
        (3, 3, 8, 8),
        ("batch",),
        1,
        {"Conv": {LOW}, "Gemm": {LOW}, "BatchNormalization": {"FLOAT"}, "LogSoftmax": {"FLOAT"}},
    ),
    "norms": Case(
        Norms, (3, 4, 6), ("batch",), 1, {"Conv": {LOW}, "InstanceNormalization": {"FLOAT"}}
    ),
    # scaled_dot_product_attention is one op: its softmax is no call of F.softmax.
    "attention": Case(
        Attention, (3, 5, 8), ("batch", "tokens"), 2, {"MatMul": {LOW}, "Softmax": {LOW}}
    ),
    "region": Case(Region, (3, 8), ("batch",), 1, {"Gemm": {LOW, "FLOAT"}}),
}


@dataclass(frozen=True)
class Artefact:
    """An exported model, and what it gave in eager mode before: converted and not."""

    case: Case
    dtype: torch.dtype
    proto: Any
    inputs: list[tuple[Tensor, ...]]
    expected: list[tuple[Tensor, ...]]
    unconverted: list[tuple[Tensor, ...]]


def example(case: Case, *, longer: int) -> tuple[Tensor, ...]:
    """Returns inputs, exact in bf16 and fp16, that add up to 0 over the first layer's sum."""
    shape = [n + longer * (axis < len(case.dynamic)) for axis, n in enumerate(case.shape)]
    tokens = shape[1]
    shape[case.summed] //= 2
    half = torch.randint(-8, 9, shape) / 8
    shape[case.summed] = case.shape[case.summed] % 2
    x = torch.cat([half, -half, torch.zeros(shape)], case.summed)
    if case.model is not Attention:
        return (x,)
    later = torch.ones(tokens, tokens).triu(1).bool()
    return x, torch.randn(tokens, tokens).masked_fill(later, -torch.inf)


def export(case: Case, dtype: torch.dtype, folder: Path, opset: int | None = None) -> Artefact:
    """Exports the model under the conversion; runs it there and without, at two input sizes."""
    torch.manual_seed(0)
    model = case.model().eval()
    inputs = [example(case, longer=0), example(case, longer=2)]
    dims = {axis: torch.export.Dim(label) for axis, label in enumerate(case.dynamic)}
    any_size = torch.export.Dim.DYNAMIC  # a second axis of the same name is warned of
    mask_dims = [{0: any_size, 1: any_size}] if case.model is Attention else []

    def results() -> list[tuple[Tensor, ...]]:
        found = [model(*args) for args in inputs]
        return [(result,) if isinstance(result, Tensor) else result for result in found]

    with torch.no_grad():
        model.first.weight += OFFSET
        unconverted = results()
        with hmpx.convert(low_precision_type=dtype, device_types={"cpu"}):
            expected = results()
            path = folder / "exported.onnx"
            shapes = (dims, *mask_dims)
            found = hmpx.export(model, inputs[0], path, dynamic_shapes=shapes, opset_version=opset)
    assert found.faults == ()
    return Artefact(case, dtype, onnx.load(path), inputs, expected, unconverted)


def node_types(proto: Any) -> list[tuple[str, list[str], list[str]]]:
    """Returns each node's op, and the types of its inputs and outputs."""
    graph = onnx.shape_inference.infer_shapes(proto).graph
    values = [*graph.input, *graph.value_info, *graph.output]
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    name_of = onnx.TensorProto.DataType.Name
    return [
        (
            node.op_type,
            [name_of(types[name]) for name in node.input if name],
            [name_of(types[name]) for name in node.output if name],
        )
        for node in graph.node
    ]


RUNNER = """
import sys
import numpy as np

runtime, folder, examples = sys.argv[1:]
if runtime == "onnxruntime":
    import onnxruntime
    session = onnxruntime.InferenceSession(folder + "/model.onnx", providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
else:
    from onnx.reference import ReferenceEvaluator
    session = ReferenceEvaluator(folder + "/model.onnx")
    names = session.input_names
for number in range(int(examples)):
    arrays = np.load(f"{folder}/inputs{number}.npz")
    feed = {name: arrays[f"arr_{i}"] for i, name in enumerate(names)}
    np.savez(f"{folder}/outputs{number}.npz", *session.run(None, feed))
assert not {"torch", "hmpx"} & sys.modules.keys()
"""


def run_elsewhere(runtime: str, artefact: Artefact, folder: Path) -> list[tuple[Tensor, ...]]:
    """Returns what the saved model gives in a process that imports neither hmpx nor torch."""
    onnx.save(artefact.proto, str(folder / "model.onnx"))
    for number, args in enumerate(artefact.inputs):
        np.savez(folder / f"inputs{number}.npz", *[tensor.numpy() for tensor in args])
    command = [sys.executable, "-c", RUNNER, runtime, str(folder), str(len(artefact.inputs))]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert run.returncode == 0, run.stderr
    outputs = [np.load(folder / f"outputs{n}.npz") for n in range(len(artefact.inputs))]
    return [tuple(torch.from_numpy(arrays[key]) for key in arrays) for arrays in outputs]


#: The results are below 2, where neighbours lie this far apart. The runtimes round elsewhere than
#: torch: onnxruntime's CPU runs fp16 nodes in fp32, ONNX's reference rounds before it adds a bias.
ATOL = {FP16: 2**-10, BF16: 2**-7}


def assert_equals_eager(artefact: Artefact, runtime: str, folder: Path) -> None:
    """Compares at both sizes; the first of the results must also be far from what fp32 gives."""
    is_exact = artefact.case is CASES["region"]
    atol = ATOL[artefact.dtype]
    for actual, expected, unconverted in zip(
        run_elsewhere(runtime, artefact, folder),
        artefact.expected,
        artefact.unconverted,
        strict=True,
    ):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0 if is_exact else atol)
        assert (actual[0] - unconverted[0]).abs().max() > 4 * atol


EXPORTS = [
    pytest.param((name, dtype), id=f"{name} {ONNX_TYPES[dtype]}")
    for name in CASES
    for dtype in (FP16, BF16)
]


@pytest.fixture(scope="module", params=EXPORTS)
def artefact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Artefact:
    """Each model for each low type."""
    name, dtype = request.param
    return export(CASES[name], dtype, tmp_path_factory.mktemp("exported"))


@pytest.mark.sampled(4)
def test_the_graph_is_valid_and_holds_the_casts(artefact: Artefact) -> None:
    """Low-precision ops compute in the low type, those of the fp32 list and of regions in fp32."""
    onnx.checker.check_model(artefact.proto, full_check=True)
    low, nodes = ONNX_TYPES[artefact.dtype], node_types(artefact.proto)
    assert ("Cast", ["FLOAT"], [low]) in nodes
    assert ("Cast", [low], ["FLOAT"]) in nodes
    actual: dict[str, set[str]] = {}
    for op, inputs, outputs in nodes:
        if op in artefact.case.types:
            actual.setdefault(op, set()).update(inputs, outputs)
    expected = {
        op: {low if name == LOW else name for name in names}
        for op, names in artefact.case.types.items()
    }
    assert actual == expected


@pytest.mark.sampled(4)
def test_onnx_reference_equals_eager(artefact: Artefact, tmp_path: Path) -> None:
    """In bf16 and fp16, in a process without hmpx, at a size that was not exported too."""
    assert_equals_eager(artefact, "reference", tmp_path)


@pytest.mark.sampled(4)
def test_onnxruntime_equals_eager_or_names_the_kernel_it_lacks(
    artefact: Artefact, tmp_path: Path
) -> None:
    """Its CPU runs fp16, and refuses products in bf16 when it loads the model."""
    if artefact.dtype is FP16:
        assert_equals_eager(artefact, "onnxruntime", tmp_path)
        return
    lacks = r"NOT_IMPLEMENTED : Could not find an implementation for (Gemm|MatMul|Conv)\(\d+\)"
    model, providers = artefact.proto.SerializeToString(), ["CPUExecutionProvider"]
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented, match=lacks):
        onnxruntime.InferenceSession(model, providers=providers)


def test_attention_becomes_one_low_precision_node(tmp_path: Path) -> None:
    """Since opset 23 ONNX has scaled_dot_product_attention; the float mask is cast for it."""
    artefact = export(CASES["attention"], FP16, tmp_path, 23)
    onnx.checker.check_model(artefact.proto, full_check=True)
    found = [inputs for op, inputs, _ in node_types(artefact.proto) if op == "Attention"]
    assert found == [["FLOAT16"] * 4]
    assert_equals_eager(artefact, "onnxruntime", tmp_path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*(legacy TorchScript|torch.jit):DeprecationWarning")
@pytest.mark.parametrize("dynamo", [True, False])
def test_number_formats_are_refused(dynamo: bool, tmp_path: Path) -> None:
    """ONNX has no view of another dtype, by which they round."""
    message = "float8_e4m3fn: ONNX can't hold a number format; use torch.export"
    with hmpx.convert(low_precision_type="float8_e4m3fn"), pytest.raises(Exception) as error:
        torch.onnx.export(
            nn.Linear(8, 4).eval(), (torch.ones(2, 8),), tmp_path / "a.onnx", dynamo=dynamo
        )
    assert message in str(error.value)
