"""`export`: writes a converted model as an ONNX file in which every node has its type."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import functools
import os
import re
import stat
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from .. import arguments
from ..errors import HmpxError, OptionError, raised_here, said_by, short
from ..files import unfinished_folder, unwritable
from ..inputs import Steps, arguments_of
from ..later import imported
from ..observers import is_users
from ..ops import role
from ..patching import Patch, apply, undo
from ..places import located
from ..recording import record
from ..reports import Row
from ..session import about_run, check_names, convert, current, refuse_where_off
from ..tensors import tensors_of
from ..torch_internals import is_any_autocast_enabled
from ..torch_state import unchanged
from .onnx_file import BEYOND, DTYPE, LOCATION, OP, REASON, OnnxFile, module_of, read_onnx
from .values import errors

_OUTPUTS: Final = ("fp32", "keep")

#: Functions of ATen and prims that cast.
_CASTS: Final = ("_to_copy.", "to.", "convert_element_type.")

#: ONNX's operators that move values and compute nothing.
_MOVING: Final = frozenset(
    {
        "Concat",
        "Expand",
        "Flatten",
        "Gather",
        "Identity",
        "Pad",
        "Reshape",
        "Slice",
        "Split",
        "Tile",
        "Squeeze",
        "Transpose",
        "Unsqueeze",
    }
)

#: Names of the policies that tell the type of an op whatever its inputs are.
_TYPED: Final = frozenset({"LOW", "FP32", "WIDEST"})

#: The first opset whose products and convolutions take bfloat16.
_BFLOAT16_OPSET: Final = 22


def export(
    model: nn.Module,
    inputs: Any,
    path: str | os.PathLike[str],
    *,
    outputs: str = "fp32",
    dynamic_shapes: Any = None,
    opset_version: int | None = None,
    verify: bool | Literal["file"] = False,
    **conversion: Any,
) -> OnnxFile:
    """Writes an ONNX file in which every node has the type that the conversion gives its op.

    Casts are nodes, and weights are stored in the type in which they are used ([ONNX](freeze.md#onnx)). torch's
    exporter makes the graph.

    Args:
        model: In evaluation mode.
        inputs: The arguments of the forward ([inputs](#inputs)). They also give the inputs' types.
        path: The file to write. Weights beyond 2 GB go to ``PATH.data``.
        outputs: ``"fp32"`` casts low outputs to float32; ``"keep"`` leaves them unchanged.
        dynamic_shapes: As for `torch.onnx.export`.
        opset_version: ONNX's opset; None: torch's default, or 22 with bfloat16.
        verify: Whether each op is also computed from torch's inputs, by onnxruntime or ONNX's reference, for the
            ``error`` of nodes: the largest difference, in units of roundoff of the largest value. ``"file"`` compares
            the file at ``path``, from an earlier export of this model, instead of writing one.
        **conversion: Arguments of `convert`. None given: the conversion in force, else the default.

    Returns:
        The file's nodes and faults, as read from the file.

    Raises:
        OptionError: An argument has an invalid value, the model is in training mode, casts are off, torch can't
            export it, or the file can't be written. An earlier file stays.

    Example:
        >>> model = torch.nn.Linear(4, 2).eval()
        >>> found = hmpx.export(model, torch.ones(1, 4), "linear.onnx", low_precision_type="float16")
        >>> print(found.nodes[1].op_type, found.nodes[1].dtype, found.stored)
        Gemm float16 {'float16': 20}
    """
    arguments.choice("outputs", outputs, _OUTPUTS)
    if verify != "file":
        arguments.truth("verify", verify)
    given = arguments.path("path", path)
    try:
        target = Path(os.path.realpath(given))  # a symbolic link stays
    except raised_here(ValueError) as error:
        raise unwritable(given, error) from error
    if target.exists() and not target.is_file():
        raise unwritable(target, OSError(errno.EINVAL, "not a regular file"))
    if target.suffix != ".onnx":
        raise OptionError(f"path must end in .onnx, as {short(str(target))} does not")
    if opset_version is not None:
        arguments.whole("opset_version", opset_version, 1)
    check_names(export, conversion)
    if not isinstance(model, nn.Module):
        raise OptionError(f"hmpx.export takes a torch.nn.Module, not {type(model).__name__}")
    busy = next((name or "it" for name, each in model.named_modules() if each.training), None)
    if busy is not None:
        raise OptionError(
            f"{type(model).__name__} is in training mode ({busy}), so its dropout and batch norms would be exported as "
            "for training; call model.eval() before hmpx.export"
        )
    for package in ("onnx", "onnxscript"):
        imported(package, "hmpx.export")
    finished = read_onnx(target) if verify == "file" else None
    refuse_where_off("export")
    args, kwargs = arguments_of(inputs)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(unfinished_folder(target))
        stack.enter_context(unchanged(model, inputs))
        session = current()
        is_deciding = session and (session.policy.decisions or session.policy.sections)
        if conversion or not is_deciding:
            tensors = [*model.parameters(), *tensors_of((args, kwargs))]
            device_types = {each.device.type for each in tensors} or {"cpu"}
            stack.enter_context(convert(**{"device_types": device_types, **conversion}))
        stack.enter_context(torch.no_grad())
        with record() as report, _no_autocast(model):
            Steps("export", model).forward(inputs)
        rows = report.rows
        if opset_version is None and any(row.dtype == "bfloat16" for row in rows):
            opset_version = _BFLOAT16_OPSET
        program, wide = _exported(
            model, args, kwargs, dynamic_shapes=dynamic_shapes, opset_version=opset_version
        )
        opset = program.model.graph.opset_imports[""]
        if opset_version not in {None, opset}:
            raise OptionError(
                f"opset_version={opset_version}: torch exports this model in opset {opset}"
            )
        if finished is not None:
            return _compared(finished, program, tensors_of((args, kwargs)), wide)
        differences = errors(program, tensors_of((args, kwargs)), wide) if verify else {}
        _name_weights(program)
        _store_low(program.model.graph)
        in_force = current()
        is_typed = in_force is not None and in_force.options.legalize != "always"
        _annotate(program, rows, is_typed=is_typed)
        made = {node.name: node.outputs[0].name for node in program.model.graph}
        if outputs == "fp32":
            _upcast_outputs(program.model.graph)
        found = _written(program, folder, target, wide)
    # Names of values before outputs were cast.
    nodes = [
        dataclasses.replace(each, error=differences.get(made.get(each.name, "")))
        for each in found.nodes
    ]
    return dataclasses.replace(found, path=str(target), nodes=tuple(nodes))


def _compared(found: OnnxFile, program: Any, inputs: Iterable[Tensor], wide: set[str]) -> OnnxFile:
    """Returns a finished file with the errors of its nodes, by the names of values in torch's program."""
    graph = imported("onnx", "verify='file'").load(found.path)
    lows = {name for node in graph.graph.node for name in node.output if name.endswith(".low")}
    names = {name.removesuffix(".low"): f"{name}.upcast" for name in lows}
    names |= {name: name.removesuffix(".low") for name in lows}  # before outputs were cast
    for values in (each for node in graph.graph.node for each in (node.input, node.output)):
        values[:] = [names.get(name, name) for name in values]
    finished = SimpleNamespace(exported_program=program.exported_program, model_proto=graph)
    differences = errors(finished, inputs, wide)
    computed = {node.name for node in program.exported_program.graph.nodes}
    if computed.isdisjoint(name for node in graph.graph.node for name in node.output):
        raise OptionError(
            f"{short(found.path)} has no value with a name of this model's; hmpx.export it with verify=True"
        )
    made = {node.name: node.output[0] for node in graph.graph.node}
    nodes = [
        dataclasses.replace(each, error=differences.get(made.get(each.name, "")))
        for each in found.nodes
    ]
    return dataclasses.replace(found, nodes=tuple(nodes), about=about_run())


@contextlib.contextmanager
def _no_autocast(model: nn.Module) -> Iterator[None]:
    """Raises OptionError if a forward enters torch.autocast: torch's exporter would apply that instead of the lists."""
    enter: Any = torch.autocast.__enter__
    thread = threading.get_ident()

    @functools.wraps(enter)
    def entering(region: Any) -> Any:
        result = enter(region)
        if threading.get_ident() == thread and is_any_autocast_enabled():
            region.__exit__(None, None, None)
            raise OptionError(
                f"{type(model).__name__} enters torch.autocast in its forward, so the file would have autocast's types "
                "there; take it out before hmpx.export"
            )
        return result

    if is_any_autocast_enabled():
        raise OptionError("export was called under torch.autocast; call it outside")
    applied = apply([Patch(torch.autocast, "__enter__", entering)])
    try:
        yield
    finally:
        undo(applied)


def _written(program: Any, folder: Path, target: Path, wide: set[str]) -> OnnxFile:
    """Writes a program's files in a folder, reads them back, and moves them to their place."""
    try:
        program.save(folder / target.name)
        found = read_onnx(folder / target.name, about_run())
        mixed = [each for each in found.faults if "mixed inputs" in each]
        if wide and mixed:
            kept = "; ".join(found.kept_wide)
            raise OptionError(
                f"{mixed[0]}, as weights that float16 can't hold stay in float32 ({kept}); export with "
                "low_precision_type='bfloat16', or scale these weights"
            )
        # The weights first, since the graph refers to them.
        for each in sorted(folder.iterdir(), reverse=True):
            place = target.with_name(each.name)
            if place.is_file():
                each.chmod(stat.S_IMODE(place.stat().st_mode))
            each.replace(place)
    except raised_here(OSError) as error:
        raise unwritable(target, error) from error
    return found


def _exported(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], **options: Any
) -> tuple[Any, set[str]]:
    """Returns torch's ONNX program of a model, and the values that `_keep_wide` changed."""
    import numpy

    try:
        # The exporter calls functions that torch has deprecated, and casts weights by numpy.
        with warnings.catch_warnings(), numpy.errstate(over="ignore"):
            warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
            unoptimized: Any = {"dynamo": True, "verbose": False, "optimize": False}
            program: Any = torch.onnx.export(
                model, args, kwargs=dict(kwargs), **unoptimized, **options
            )
            wide = _keep_wide(program.model)
            program.optimize()
            return program, wide
    except raised_here(Exception) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
            if isinstance(cause, HmpxError):
                raise cause from error
        raise OptionError(
            f"torch.onnx.export can't export {type(model).__name__}: {said_by(cause)}; see whether it exports without "
            "hmpx, by torch.onnx.export(model, inputs, dynamo=True)"
        ) from error


def _keep_wide(model: Any) -> set[str]:
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


def _name_weights(program: Any) -> None:
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


def _store_low(graph: Any) -> None:
    """Stores weights in the types to which nodes cast them; torch's exporter leaves large ones in float32."""
    import onnx_ir as ir

    lows = {ir.DataType.FLOAT16: torch.float16, ir.DataType.BFLOAT16: torch.bfloat16}
    weights = {id(each) for each in graph.initializers.values()}
    nodes: list[Any] = [*graph.all_nodes()]
    for node in nodes:
        if node.op_type != "Cast" or id(node.inputs[0]) not in weights:
            continue
        weight, cast = node.inputs[0], node.outputs[0]
        is_kept = cast.is_graph_output() or cast.dtype not in lows
        if weight.dtype != ir.DataType.FLOAT or is_kept:
            continue
        name = f"{weight.name}.{cast.dtype.name.lower()}"
        if name not in graph.initializers:
            values = torch.from_numpy(weight.const_value.numpy()).to(lows[cast.dtype])
            stored = ir.tensor_adapters.TorchTensor(values, name=name)
            graph.initializers[name] = ir.Value(
                name=name, shape=weight.shape, type=ir.TensorType(cast.dtype), const_value=stored
            )
        ir.convenience.replace_all_uses_with(cast, graph.initializers[name])
        node.graph.remove(node, safe=True)
        if not (weight.uses() or weight.is_graph_output()):
            del graph.initializers[weight.name]
            graph.initializers[name].name = weight.name


def _annotate(program: Any, rows: Iterable[Row], *, is_typed: bool) -> None:
    """Writes the op, the decision and the line of each node's recorded calls into its metadata."""
    by_module: dict[str, list[Row]] = {}
    for row in rows:
        by_module.setdefault(row.module, []).append(row)
    roots = {node.name: _root(node) for node in program.exported_program.graph.nodes}
    made: dict[Any, str] = {}  # node -> the one of torch.export that it computes
    for node in program.model.graph.all_nodes():
        found = re.match(r"%(\w+) :", node.metadata_props.get("pkg.torch.onnx.fx_node", ""))
        if found is not None:
            made[node] = found[1]
    several = collections.Counter(
        (module_of(node.metadata_props), roots.get(name))
        for node, name in made.items()
        if any(each.name == name for each in node.outputs)
    )
    for node, name in made.items():
        metadata, op = node.metadata_props, roots.get(name)
        module, line = (
            module_of(metadata),
            _location(metadata.get("pkg.torch.onnx.stack_trace", "")),
        )
        if line:
            metadata[LOCATION] = line
        calls = by_module.get(module, [])
        at_line = [row for row in calls if located(row.location) == line]
        named = [row for row in calls if row.op == op]
        # torch keeps lines of modules' forwards alone, so a function's line may be that of its caller.
        chosen = [row for row in named if row in at_line] or named or at_line
        types = {each.dtype.name.lower() for each in node.outputs if each.dtype is not None}
        types = {"float32" if each == "float" else each for each in types}
        chosen = [row for row in chosen if row.dtype in types] or chosen
        if len({row.op for row in chosen}) != 1:
            continue
        metadata[OP] = chosen[0].op
        if metadata.get(REASON, "").endswith(BEYOND):
            continue
        metadata[REASON] = ", ".join(dict.fromkeys(row.reason for row in chosen if row.reason))
        if len({row.location for row in chosen}) == 1:
            metadata[LOCATION] = located(chosen[0].location)
        # Some calls of an op are not recorded, such as those of numbers with tensors; some ops that follow an input,
        # such as norms of low inputs with float32 weights, have no other node than a float32 one.
        is_certain = is_typed and several[module, op] == sum(row.calls for row in named)
        is_certain &= all(row.cast_policy in _TYPED for row in named)
        # A norm that a list makes low has float32 nodes.
        is_certain &= role(op or "") != "norm" or all(row.cast_policy != "LOW" for row in named)
        dtypes = {row.dtype for row in named}
        if len(dtypes) == 1 and is_certain and any(each.name == name for each in node.outputs):
            metadata[DTYPE] = dtypes.pop()


def _root(node: Any) -> str:
    """Returns the function of ATen that a node of torch.export was, before decompositions."""
    sources = node.meta.get("from_node") or ()
    name = sources[-1].name if sources else node.name
    return re.sub(r"_\d+$", "", str(name))


def _location(trace: str) -> str:
    """Returns the innermost line of a stack trace that is neither torch's nor hmpx's."""
    found = [*re.finditer(r'File "([^"]+)", line (\d+)', trace)]
    lines = [f"{each[1]}:{each[2]}" for each in found if is_users(each[1])]
    return located(lines[-1]) if lines else ""


def _upcast_outputs(graph: Any) -> None:
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
