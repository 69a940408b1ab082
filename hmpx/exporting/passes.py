"""Passes over the graph that torch's exporter makes: types, names and casts of values."""

from __future__ import annotations

from typing import Any, Final

import torch

from .onnx_file import BEYOND, REASON

#: Functions of ATen and prims that cast.
_CASTS: Final = ("_to_copy.", "to.", "convert_element_type.")

#: ONNX's operators that move values and compute nothing.
_MOVING: Final = frozenset({
    "Concat", "Expand", "Flatten", "Gather", "Identity", "Pad", "Reshape",
    "Slice", "Split", "Tile", "Squeeze", "Transpose", "Unsqueeze",
})  # fmt: skip

#: Those that view one, so that a cast may come before them. Not `Gather`: embeddings have a type of their own.
_VIEWS: Final = _MOVING - {"Concat", "Gather", "Pad", "Split"}


def keep_wide(model: Any) -> set[str]:
    """Leaves constants that float16 would make infinite in float32, and computes the nodes that use them in float32.

    Returns:
        The names of these nodes' results, which differ from torch's.
    """
    import onnx_ir as ir
    from onnx_ir.passes.common import ShapeInferencePass

    graph, changed = model.graph, set[str]()
    casts = [each for each in graph.all_nodes() if each.op_type == "Cast"]
    found = {
        node: name
        for node in casts
        if node.outputs[0].dtype == ir.DataType.FLOAT16
        and (name := _beyond_float16(node.inputs[0]))
    }
    if found:  # torch's exporter leaves types of values between nodes unknown
        ShapeInferencePass(check_type=False, strict_mode=False, data_prop=False)(model)
    for node, beyond in found.items():
        rest = [(node.outputs[0], node.inputs[0])]
        while rest:
            narrow, wide = rest.pop()
            for use in [*narrow.uses()]:
                user = use.node
                if user.op_type == "Cast" and user.outputs[0].dtype == ir.DataType.FLOAT:
                    ir.convenience.replace_all_uses_with(
                        user.outputs[0], wide, replace_graph_outputs=True
                    )
                    continue
                user.replace_input_with(use.idx, wide)
                results = [each for each in user.outputs if each.dtype == ir.DataType.FLOAT16]
                is_branch = user.graph is not graph and any(
                    each.is_graph_output() for each in results
                )
                if user.op_type in _MOVING and not is_branch:
                    _widen_inputs(user)
                    for moved in results:
                        moved.dtype = ir.DataType.FLOAT
                        rest.append((moved, moved))
                elif user.op_type not in {"Cast", "Shape", "Size"}:
                    changed |= {str(each.name) for each in user.outputs}
                    _compute_wide(user)
                    user.metadata_props[REASON] = f"{beyond} {BEYOND}"
    return changed


def _beyond_float16(value: Any) -> str:
    """Returns the name of a float32 constant with values beyond float16, moved or not; ``""`` for other values."""
    constant = value.producer()
    if constant is not None and constant.op_type in _MOVING:
        moved = (_beyond_float16(each) for each in constant.inputs if each is not None)
        return next(filter(None, moved), "")
    is_constant = constant is not None and constant.op_type in {"Constant", "ConstantOfShape"}
    attribute = constant.attributes.get("value") if is_constant else None
    array = attribute.value if attribute is not None else value.const_value
    if array is None or array.dtype.name != "FLOAT":
        return ""
    tensor = torch.from_numpy(array.numpy().copy())
    return str(value.name) if bool((tensor.half().isinf() & tensor.isfinite()).any()) else ""


def _widen_inputs(node: Any) -> None:
    """Gives a node float32 for its float16 inputs, from before their cast if there is one."""
    import onnx_ir as ir

    for index, value in enumerate(node.inputs):
        if value is None or value.dtype != ir.DataType.FLOAT16:
            continue
        made = value.producer()
        wide = made.inputs[0] if made is not None and made.op_type == "Cast" else value
        if wide.dtype != ir.DataType.FLOAT:
            upcast = _cast(value, ir.DataType.FLOAT)
            node.graph.insert_before(node, upcast)
            wide = upcast.outputs[0]
        node.replace_input_with(index, wide)


def _compute_wide(node: Any) -> None:
    """Computes a node in float32, and casts its results to float16."""
    import onnx_ir as ir

    _widen_inputs(node)
    for value in node.outputs:
        if value.dtype != ir.DataType.FLOAT16:
            continue
        cast = _cast(value, ir.DataType.FLOAT16)
        low = cast.outputs[0]
        ir.convenience.replace_all_uses_with(value, low, replace_graph_outputs=True)
        cast.replace_input_with(0, value)
        node.graph.insert_after(node, cast)
        low.name, value.name = value.name, f"{value.name}.float32"
        value.dtype = ir.DataType.FLOAT


def _cast(value: Any, dtype: Any, name: str | None = None) -> Any:
    """Returns a node that casts a value, for a graph."""
    import onnx_ir as ir

    node = ir.node("Cast", [value], attributes={"to": dtype}, name=name)
    node.outputs[0].dtype, node.outputs[0].shape = dtype, value.shape
    return node


def name_weights(program: Any) -> None:
    """Names weights that were stored low by their parameters, unless others have these names."""
    signature = program.exported_program.graph_signature
    given = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    initializers = program.model.graph.initializers
    for node in program.exported_program.graph.nodes:
        source = node.args[0] if node.args else None
        name = given.get(getattr(source, "name", None))
        is_cast = str(node.target).partition(".")[2].startswith(_CASTS)
        if name is None or not is_cast or node.name not in initializers:
            continue
        value = initializers[node.name]
        free = name if name not in initializers else f"{name}.{value.dtype.name.lower()}"
        if free not in initializers:
            value.name = free


def store_low(graph: Any) -> None:
    """Stores weights in the types to which nodes cast them, moved or not; torch's exporter leaves large ones in float32."""
    import onnx_ir as ir

    lows = {ir.DataType.FLOAT16: torch.float16, ir.DataType.BFLOAT16: torch.bfloat16}
    weights = {id(each) for each in graph.initializers.values()}
    nodes: list[Any] = [*graph.all_nodes()]
    for node in nodes:
        if node.op_type != "Cast":
            continue
        weight, cast, moves = node.inputs[0], node.outputs[0], list[Any]()
        while (move := weight.producer()) and move.op_type in _VIEWS:
            moves.append(move)
            weight = move.inputs[0]
        is_kept = cast.is_graph_output() or cast.dtype not in lows
        if id(weight) not in weights or weight.dtype != ir.DataType.FLOAT or is_kept:
            continue
        name = f"{weight.name}.{cast.dtype.name.lower()}"
        if name not in graph.initializers:
            values = torch.from_numpy(weight.const_value.numpy()).to(lows[cast.dtype])
            stored = ir.tensor_adapters.TorchTensor(values, name=name)
            graph.initializers[name] = ir.Value(
                name=name, shape=weight.shape, type=ir.TensorType(cast.dtype), const_value=stored
            )
        low = graph.initializers[name]
        for move in reversed(moves):
            given = (low, *move.inputs[1:])
            again = ir.Node(move.domain, move.op_type, given, move.attributes.values())
            again.metadata_props.update(move.metadata_props)
            node.graph.insert_before(node, again)
            low = again.outputs[0]
            low.dtype, low.shape = cast.dtype, move.outputs[0].shape
        name, cast.name = cast.name, None
        if moves:
            low.name = name
        ir.convenience.replace_all_uses_with(cast, low)
        for unused in (node, *moves):
            if not any(each.uses() or each.is_graph_output() for each in unused.outputs):
                unused.graph.remove(unused, safe=True)
        if not (weight.uses() or weight.is_graph_output()):
            stored = graph.initializers[f"{weight.name}.{cast.dtype.name.lower()}"]
            del graph.initializers[weight.name]
            stored.name = weight.name


def upcast_outputs(graph: Any) -> None:
    """Casts low outputs to float32; they keep their names."""
    import onnx_ir as ir

    for index, value in enumerate(graph.outputs):
        if value.dtype not in {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}:
            continue
        name = value.name
        value.name = f"{name}.low"
        uses = [use.node for use in value.uses()]
        casts = [
            node
            for node in uses
            if node.graph is graph
            and node.op_type == "Cast"
            and node.outputs[0].dtype == ir.DataType.FLOAT
        ]
        if casts and not casts[0].outputs[0].is_graph_output():
            upcast = casts[0].outputs[0]
        else:
            cast = _cast(value, ir.DataType.FLOAT, f"{name}.upcast")
            graph.append(cast)
            upcast = cast.outputs[0]
        upcast.name = name
        graph.outputs[index] = upcast
