"""Compares the results of an ONNX file's nodes with torch's, from the same inputs."""

from __future__ import annotations

import importlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

from ..errors import OptionError, passing_over, short
from ..later import imported

#: Attributes that give the type of a result.
_TYPES: Final = frozenset({"to", "dtype", "output_dtype"})


#: Type -> the error of a node without a fault: an ulp, as each node rounds once; in float32 1.3e-6, as in
#: `torch.testing.assert_close`, since kernels sum in other orders.
MOST_ULPS: Final = {"float16": 1.0, "bfloat16": 1.0, "float32": 11.0}


def eager(program: Any, inputs: Iterable[Tensor]) -> dict[str, Tensor]:
    """Returns the name of a node of torch.export -> its value, for tensors."""
    tensors = iter(inputs)
    kinds = torch.export.graph_signature.InputKind
    given: list[Any] = []
    for each in program.graph_signature.input_specs:
        if hasattr(each.arg, "value"):
            given.append(each.arg.value)  # a number, None
        elif each.kind is kinds.USER_INPUT:
            given.append(next(tensors))
        else:
            given.append(program.state_dict.get(each.target, program.constants.get(each.target)))
    interpreter = torch.fx.Interpreter(program.graph_module, garbage_collect_values=False)
    interpreter.run(*given)
    found = {node.name: value for node, value in interpreter.env.items()}
    return {name: each.detach().cpu() for name, each in found.items() if isinstance(each, Tensor)}


def check_inputs(path: Path, given: Mapping[str, Tensor], *, are_all: bool) -> None:
    """Raises OptionError if a file's inputs have other dtypes or shapes than these, or, of all, other names."""
    onnx = imported("onnx", "comparing nodes")
    graph = onnx.load(path, load_external_data=False).graph
    stored = {each.name for each in graph.initializer}
    for each in graph.input:
        value, kind = given.get(each.name), each.type.tensor_type
        sizes = [size.dim_value or size.dim_param or "?" for size in kind.shape.dim]
        dtype = str(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
        takes = f"{short(str(path))} takes {each.name}: {dtype}[{', '.join(map(str, sizes))}]"
        if value is None and are_all and each.name not in stored:
            raise OptionError(f"{takes}; the model has no input of this name")
        if value is None:
            continue
        has = str(value.dtype).removeprefix("torch.")
        pairs = zip(sizes, value.shape, strict=False)
        is_alike = len(sizes) == value.ndim and all(
            size == n for size, n in pairs if isinstance(size, int)
        )
        if has != dtype or not is_alike:
            raise OptionError(f"{takes}; the given one is {has}{[*value.shape]}")
    made = {name for node in graph.node for name in node.output}
    if are_all and made.isdisjoint(given):
        raise OptionError(
            f"{short(str(path))} has no value with a name of this model's; files of hmpx.export and of "
            "torch.onnx.export(dynamo=True) have them"
        )


def errors(
    path: Path, expected: Mapping[str, Tensor], skipped: Collection[str]
) -> tuple[dict[str, float], set[str]]:
    """Returns the name of a value of a file -> its error, for the floating-point results that torch has; and all names.

    Each node is computed in float32, from torch's values where it has them, and its results are rounded to their
    types. Errors are those per node since torch's values. Values in ``skipped``, and those between torch's that are
    made with them, are not compared. The names are of the values that were computed.
    """
    onnx = imported("onnx", "comparing nodes")
    model = onnx.load(path, load_external_data=False)
    if model.functions:
        model = imported("onnx.inliner", "reading functions").inline_local_functions(model)
    graph = onnx.shape_inference.infer_shapes(model).graph
    described = {each.name: each for each in (*graph.input, *graph.value_info, *graph.output)}
    made = {name for node in graph.node for name in node.output}
    stored = {each.name: each for each in graph.initializer}
    # `upcast_outputs` gave a low output's name to its upcast.
    lows = {name.removesuffix(".low"): name for name in made if name.endswith(".low")}
    wanted = {lows.get(name, name): each for name, each in expected.items()}
    wanted |= {name: expected[name].float() for name in lows if name in expected}
    types = {name: each.type.tensor_type.elem_type for name, each in described.items()}
    values = {name: _rounded(onnx, _array(each), types.get(name)) for name, each in wanted.items()}
    for name, each in stored.items():
        with passing_over(Exception):  # the file's faults say that it can't be read
            array = onnx.numpy_helper.to_array(each, str(path.parent))
            values[name] = array.astype("f4") if _is_low(onnx, each.data_type) else array
    found, computed = dict[str, float](), set[str]()
    changed = {lows.get(name, name) for name in skipped}
    between = set[str]()
    made_of: dict[str, int] = {}  # value between torch's -> its nodes
    for node in graph.node:
        nodes = 1 + sum(made_of.get(name, 0) for name in {*node.input})
        is_changed = not (between.isdisjoint(node.input) and changed.isdisjoint(node.output))
        for name, result in _results(onnx, model, node, values):
            computed.add(name)
            got = _rounded(onnx, result, types.get(name))
            want = None if isinstance(got, list) else wanted.get(name)
            if want is None:
                values[name], made_of[name] = got, nodes
                between |= {name} if is_changed else set()
            elif want.is_floating_point() and want.numel() and not is_changed:
                found[name] = _error(torch.tensor(got), want) / nodes
    return found, computed


def _is_low(onnx: ModuleType, code: int | None) -> bool:
    return code in (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


def _array(tensor: Tensor) -> Any:
    """Returns a tensor as numpy's array, in float32 if it is low."""
    is_low = tensor.dtype in (torch.float16, torch.bfloat16)
    return (tensor.float() if is_low else tensor).contiguous().numpy()


def _rounded(onnx: ModuleType, value: Any, code: int | None) -> Any:
    """Returns an array with the values of a low type; others, and sequences, as they are."""
    if not _is_low(onnx, code) or getattr(value, "dtype", "") != "float32":
        return value
    dtype = torch.float16 if code == onnx.TensorProto.FLOAT16 else torch.bfloat16
    return torch.tensor(value).to(dtype).float().numpy()


def _results(
    onnx: ModuleType, model: Any, node: Any, values: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yields the names and the values of a node's results, computed in float32 instead of low types.

    Yields none where inputs are unknown, where the node holds graphs, or where no evaluator has the operator.
    """
    names, results = dict.fromkeys(filter(None, node.input)), [*filter(None, node.output)]
    has_graphs = any(each.g.node or each.graphs for each in node.attribute)
    if has_graphs or any(values.get(name) is None for name in names):
        return
    wide = type(node)()
    wide.CopyFrom(node)
    for each in wide.attribute:
        if each.name in _TYPES and _is_low(onnx, each.i):
            each.i = onnx.TensorProto.FLOAT
        if _is_low(onnx, each.t.data_type):
            array = onnx.numpy_helper.to_array(each.t).astype("f4")
            each.t.CopyFrom(onnx.numpy_helper.from_array(array))
    given = {name: values[name] for name in names}
    graph = onnx.helper.make_graph(
        [wide],
        "node",
        [_described(onnx, name, value) for name, value in given.items()],
        [onnx.ValueInfoProto(name=name) for name in results],
    )
    alone = onnx.helper.make_model(
        graph, opset_imports=model.opset_import, ir_version=model.ir_version
    )
    for evaluate in (_by_onnxruntime, _by_openvino, _by_reference):
        with passing_over(Exception):  # it is not installed, or has no such kernel
            yield from zip(results, evaluate(alone, given), strict=True)
            return


def _described(onnx: ModuleType, name: str, value: Any) -> Any:
    if isinstance(value, list):
        dtype = onnx.helper.np_dtype_to_tensor_dtype(value[0].dtype)
        return onnx.helper.make_tensor_sequence_value_info(name, dtype, None)
    dtype = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
    return onnx.helper.make_tensor_value_info(name, dtype, value.shape)


def _by_onnxruntime(model: Any, given: Mapping[str, Any]) -> list[Any]:
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # only fatal errors
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1  # it would start them per node
    session = runtime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return [*session.run(None, dict(given))]


def _by_openvino(model: Any, given: Mapping[str, Any]) -> list[Any]:
    openvino = importlib.import_module("openvino")
    core = openvino.Core()
    exact = {"INFERENCE_PRECISION_HINT": "f32"}  # some CPUs would compute in bfloat16
    compiled = core.compile_model(core.read_model(model.SerializeToString()), "CPU", exact)
    return [*compiled([*given.values()]).values()]


def _by_reference(model: Any, given: Mapping[str, Any]) -> list[Any]:
    reference = importlib.import_module("onnx.reference")
    return [*reference.ReferenceEvaluator(model).run(None, dict(given))]


def _error(got: Tensor, want: Tensor) -> float:
    """Returns the largest difference in ulps of the largest finite value; inf for NaN in one alone or other shapes."""
    if got.shape != want.shape:
        return math.inf
    exact = want.double()
    same = (got == exact) | (got.isnan() & exact.isnan())
    if bool(same.all()):
        return 0.0
    finite = exact[exact.isfinite()].abs()
    kind = torch.finfo(want.dtype)
    largest = max(float(finite.max()) if finite.numel() else 1.0, kind.tiny)
    ulp = kind.eps * 2.0 ** (math.frexp(largest)[1] - 1)
    difference = float((got - exact)[~same].abs().max())
    return math.inf if math.isnan(difference) else difference / ulp
