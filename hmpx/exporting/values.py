"""Compares the results of an ONNX graph's nodes with torch's, from the same inputs."""

from __future__ import annotations

import importlib
import math
from collections.abc import Collection, Iterable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..errors import passing_over
from ..later import imported


def errors(program: Any, inputs: Iterable[Tensor], skipped: Collection[str]) -> dict[str, float]:
    """Returns the name of a value -> its error, for the floating-point results of ATen's ops in a program.

    Values in ``skipped``, and those that are made with them, are not compared.

    Each is computed from torch's values: by onnxruntime, or by ONNX's reference where that has no kernel. The error
    is the largest difference, in units of roundoff of the largest value.
    """
    onnx, numpy = imported("onnx", "verify=True"), imported("numpy", "verify=True")
    expected = {
        name: value.detach().cpu()
        for name, value in _eager(program.exported_program, inputs).items()
        if isinstance(value, Tensor)
    }
    model = program.model_proto
    makers = {name: node for node in model.graph.node for name in node.output}
    constants = {each.name: each for each in model.graph.initializer}
    arrays = {name: _array(onnx, value) for name, value in expected.items()}
    found: dict[str, float] = {}
    for node in model.graph.node:
        for name in node.output:
            want = expected.get(name)
            if want is None or not want.is_floating_point() or not want.numel():
                continue
            parts, needed = _parts(name, makers, expected.keys() - {name})
            if any(each in skipped for part in parts for each in part.output):
                continue
            has_branches = any(a.g.node or a.graphs for each in parts for a in each.attribute)
            is_known = all(each in arrays or each in constants for each in needed)
            if has_branches or not is_known:
                continue
            given = {each: arrays[each] for each in needed if each not in constants}
            graph = onnx.helper.make_graph(
                parts,
                "part",
                [_described(onnx, each, array) for each, array in given.items()],
                [_described(onnx, name, arrays[name])],
                [constants[each] for each in needed if each in constants],
            )
            part = onnx.helper.make_model(
                graph,
                opset_imports=model.opset_import,
                functions=model.functions,
                ir_version=model.ir_version,
            )
            got = _run(part, given)
            if got is not None:
                got = numpy.asarray(got, dtype=numpy.float64)
                found[name] = _error(torch.from_numpy(got), want)
    return found


def _eager(program: Any, inputs: Iterable[Tensor]) -> dict[str, Any]:
    """Returns the name of a node of torch.export -> its value."""
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
    return {node.name: value for node, value in interpreter.env.items()}


def _parts(
    name: str, makers: Mapping[str, Any], known: Collection[str]
) -> tuple[list[Any], list[str]]:
    """Returns the nodes that make a value from known ones and constants, in order, and the names of these."""
    parts, needed, rest = set[str](), dict[str, None](), [name]
    while rest:
        node = makers[rest.pop()]
        parts.add(node.output[0])
        for each in filter(None, node.input):
            if each in known or each not in makers:
                needed[each] = None
            elif makers[each].output[0] not in parts:
                rest.append(each)
    ordered = {id(node): node for node in makers.values() if node.output[0] in parts}
    return [*ordered.values()], [*needed]


def _array(onnx: ModuleType, tensor: Tensor) -> Any:
    """Returns a tensor as numpy's array, bfloat16 as that of ml_dtypes."""
    if tensor.dtype is not torch.bfloat16:
        return tensor.contiguous().numpy()
    dtype = onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.BFLOAT16)
    return tensor.contiguous().view(torch.uint16).numpy().view(dtype)


def _described(onnx: ModuleType, name: str, array: Any) -> Any:
    dtype = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    return onnx.helper.make_tensor_value_info(name, dtype, array.shape)


def _run(model: Any, given: Mapping[str, Any]) -> Any:
    """Returns the only output of a model; None where neither onnxruntime nor ONNX's reference computes it."""
    with passing_over(Exception):  # it is not installed, or has no kernel for these types
        return _by_onnxruntime(model, given)
    with passing_over(Exception):
        reference = importlib.import_module("onnx.reference")
        return reference.ReferenceEvaluator(model).run(None, dict(given))[0]
    return None


def _by_onnxruntime(model: Any, given: Mapping[str, Any]) -> Any:
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # only fatal errors
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = runtime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, dict(given))[0]


def _error(got: Tensor, want: Tensor) -> float:
    """Returns the largest difference, in units of roundoff of the largest finite value; inf for NaN in one alone."""
    exact = want.double()
    same = (got == exact) | (got.isnan() & exact.isnan())
    if bool(same.all()):
        return 0.0
    finite = exact[exact.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 1.0
    unit = torch.finfo(want.dtype).eps * (largest or torch.finfo(want.dtype).tiny)
    difference = float((got - exact)[~same].abs().max())
    return math.inf if math.isnan(difference) else difference / unit
