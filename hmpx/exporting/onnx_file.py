"""An ONNX file as data: its nodes, their types, and faults for strongly typed engines."""

from __future__ import annotations

import ast
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from .. import files
from ..errors import OptionError, brief, fielded, gathered, raised_here, said_by, short
from ..later import imported
from ..reports import (
    Column,
    ReportTable,
    Written,
    page,
    paragraphs,
    table_section,
    without_end,
    without_start,
    wrapped,
)

#: The version of the JSON that `OnnxFile.to_json` writes.
SCHEMA: Final = 1

#: Keys of a node's metadata that `export` writes: the op, the line that decided, the decided dtype, the program's line.
OP, REASON, DTYPE, LOCATION = "hmpx.op", "hmpx.reason", "hmpx.dtype", "hmpx.location"

#: End of the reason of nodes that a constant keeps in float32.
BEYOND: Final = "is beyond float16"

_MOST_LINES: Final = 30

#: Bits of significand and exponent of floating-point types. A cast to no fewer of both is exact.
_BITS: Final = {"float16": (11, 5), "bfloat16": (8, 8), "float32": (24, 8), "float64": (53, 11)}


@dataclass(frozen=True, slots=True)
class OnnxNode:
    """A node of an ONNX file.

    Attributes:
        name: The node's name.
        op_type: ONNX's operator: ``"Gemm"``.
        op: The op of torch that it comes from: ``"linear"``; ``""`` if unknown.
        module: Qualified name of the module; ``""`` for the outermost.
        location: ``"model.py:12"``.
        reason: The source of the decision: ``"lists/hmpx/bf16.txt:20"``; ``""`` for ops in no list.
        dtype: The floating-point type that it computes in, ``""`` for none. A cast's is its result's.
        input_dtypes: Types of its inputs.
        output_dtypes: Types of its results.
        faults: Its faults, as text.
        error: The largest difference from torch's result for the same inputs, in ulps of the largest value, by the
            number of nodes since torch's values; None: not compared.
        outputs: Names of its results.
    """

    name: str
    op_type: str
    op: str
    module: str
    location: str
    reason: str
    dtype: str
    input_dtypes: tuple[str, ...]
    output_dtypes: tuple[str, ...]
    faults: tuple[str, ...] = ()
    error: float | None = None
    outputs: tuple[str, ...] = ()

    __repr__ = fielded


@dataclass(frozen=True)
class OnnxFile(Written):
    """The nodes of an ONNX file and their types.

    Attributes:
        path: The file.
        nodes: A row per node: its ``op_type`` in ONNX, ``op``, ``module``, ``location``, ``reason``, ``dtype``,
            ``input_dtypes``, ``output_dtypes``, ``faults``, ``outputs``, and with ``verify=True`` its ``error`` in ulps.
        stored: Type of the initializers -> their bytes.
        weight_faults: Infinities in float16, values that can't be read.
        not_compared: Names of nodes that could not be computed for a comparison, such as those inside of If, Loop and Scan.
        about: See [results](#results).

    Example:
        >>> model = torch.nn.Linear(4, 2).eval()
        >>> hmpx.export(model, torch.ones(1, 4), "linear.onnx").faults
        ()
    """

    path: str
    nodes: tuple[OnnxNode, ...]
    stored: Mapping[str, int]
    weight_faults: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()
    about: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def faults(self) -> tuple[str, ...]:
        """A line for each mixed input, type off the policy, needless cast, too large error, and faulty weight."""
        found = [
            f"{node.name} ({', '.join(filter(None, (node.op_type, node.module, node.location)))}): {fault}"
            for node in self.nodes
            for fault in node.faults
        ]
        return (*found, *self.weight_faults)

    @property
    def kept_wide(self) -> tuple[str, ...]:
        """A line for each node that `export` kept in float32 for a weight or constant beyond float16."""
        return tuple(f"{node.name}: {node.reason}" for node in self.nodes if BEYOND in node.reason)

    __repr__ = brief

    def __str__(self) -> str:
        lines = [*wrapped(_verdict(self)), *wrapped(_sums(self)), ""]
        lines += _cut(list(self.faults), _MOST_LINES)
        is_compared = any(node.error is not None for node in self.nodes)
        if is_compared and self.faults:
            lines.append("")
        if is_compared or not self.faults:
            lines += _cut(_nodes(self).lines(), _MOST_LINES + 1)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<div>{paragraphs([_verdict(self), _sums(self)])}{_nodes(self).to_html()}</div>"

    def _data(self) -> Mapping[str, Any]:
        nodes = [asdict(node) for node in _worst_first(self.nodes)]
        return {"hmpx_onnx": SCHEMA, **asdict(self), "nodes": nodes}

    def _table(self) -> ReportTable:
        names = [each.name for each in fields(OnnxNode)]
        return ReportTable.of_fields(names, _worst_first(self.nodes))

    def _page(self) -> str:
        name = Path(self.path).name
        parts = [
            paragraphs([_verdict(self), _sums(self)], "verdict"),
            table_section("nodes", "Nodes"),
        ]
        tables = {"nodes": _nodes(self)}
        return page(f"hmpx: {name}", f"Types of {name}", "".join(parts), self.about, tables=tables)


def _cut(lines: list[str], most: int) -> list[str]:
    """Returns the first lines, and the number of others."""
    return lines[:most] + [f"... and {len(lines) - most} more"] * (len(lines) > most)


def _worst_first(nodes: tuple[OnnxNode, ...]) -> list[OnnxNode]:
    """Returns nodes by their errors, the others after them in their order."""
    return sorted(nodes, key=lambda node: math.inf if node.error is None else -node.error)


def _verdict(found: OnnxFile) -> str:
    count = len(found.faults)
    said = "no faults" if not count else f"{count} fault{'s' * (count > 1)}"
    compared = [node for node in _worst_first(found.nodes) if node.error is not None]
    if compared:
        worst = {node.output_dtypes[0]: node for node in reversed(compared)}
        errors = [f"{node.error:.3g} ulps of {each} ({node.name})" for each, node in worst.items()]
        said += f"; {len(compared)} compared with torch, largest errors {', '.join(sorted(errors))}"
    if found.not_compared:
        rest = gathered(found.not_compared, len(found.not_compared), 3)
        said += f"; not compared: {', '.join(rest)}"
    return f"{short(found.path)}: {len(found.nodes)} nodes, {said}"


def _sums(found: OnnxFile) -> str:
    counts: dict[str, int] = {}
    for node in found.nodes:
        kind = "casts" if node.op_type == "Cast" else f"in {node.dtype or 'integers'}"
        counts[kind] = counts.get(kind, 0) + 1
    stored = [f"{size} bytes in {dtype}" for dtype, size in found.stored.items()]
    wide = f"; in float32: {', '.join(found.kept_wide)}" if found.kept_wide else ""
    return f"{', '.join(f'{n} {kind}' for kind, n in counts.items())}; stored: {', '.join(stored) or 'nothing'}{wide}"


def _nodes(found: OnnxFile) -> ReportTable:
    nodes = _worst_first(found.nodes)

    def column(name: str, cut: Callable[[str, int], str] = without_end) -> Column:
        values = [getattr(node, name) for node in nodes]
        show = "; ".join if name == "faults" else str
        return Column(name, values, show, is_number=False, cut=cut, is_dtype=name == "dtype")

    columns = [
        *map(column, ("op_type", "dtype", "op")),
        *(column(name, without_start) for name in ("module", "location", "reason")),
    ]
    if any(node.faults for node in found.nodes):
        columns.append(column("faults"))
    if any(node.error is not None for node in found.nodes):
        columns.append(Column("error in ulps", [node.error for node in nodes], "{:.2g}".format))
    return ReportTable(columns)


# --- reading -----------------------------------------------------------------------------------------


def read_onnx(path: str | os.PathLike[str], about: Mapping[str, str] | None = None) -> OnnxFile:
    """Reads an ONNX file, its nodes' types, and its faults. Weights may be in a second file.

    Functions that a file defines are inlined.

    Raises:
        OptionError: It can't be read, or is not an ONNX model.
    """
    onnx = imported("onnx", "reading ONNX files")
    content = files.read(path, files.ONNX)
    name = os.fspath(path)
    try:
        model = onnx.load_from_string(content)
        if not model.HasField("graph"):
            raise ValueError("it holds no graph")
        if model.functions:
            model = imported("onnx.inliner", "reading functions").inline_local_functions(model)
        model = onnx.shape_inference.infer_shapes(model)
        return _GraphReader(onnx, model, Path(name).parent).read(name, about or {})
    except raised_here(Exception) as error:
        said = f"{short(name)} is not a readable ONNX model: {said_by(error)}"
        raise OptionError(said) from error


@dataclass(frozen=True)
class _Scope:
    """What the nodes of a graph see; a graph inside of another one sees what that has.

    Attributes:
        dtypes: Value -> its type.
        sources: Value -> the cast that makes it, and the type that this cast had.
        casts: Value and type -> the first cast of it.
    """

    dtypes: dict[str, str]
    sources: dict[str, tuple[Any, str]]
    casts: dict[tuple[str, str], Any]

    def inner(self) -> _Scope:
        return _Scope(dict(self.dtypes), dict(self.sources), dict(self.casts))


class _GraphReader:
    """Reads one model: collects the types of its values, then judges each node."""

    def __init__(self, onnx: ModuleType, model: Any, folder: Path) -> None:
        self._onnx, self._model, self._folder = onnx, model, str(folder)
        self._opsets = {each.domain: each.version for each in model.opset_import}
        self._stored: dict[str, int] = {}
        self._weight_faults: list[str] = []
        self._nodes: list[OnnxNode] = []

    def read(self, path: str, about: Mapping[str, str]) -> OnnxFile:
        self._read(self._model.graph, _Scope({}, {}, {}))
        stored = dict(sorted(self._stored.items()))
        return OnnxFile(path, tuple(self._nodes), stored, tuple(self._weight_faults), about=about)

    def _read(self, graph: Any, scope: _Scope) -> None:
        for value in (*graph.input, *graph.value_info, *graph.output):
            scope.dtypes[value.name] = self._name(value.type.tensor_type.elem_type)
        for each in graph.sparse_initializer:
            scope.dtypes[each.values.name] = self._name(each.values.data_type)
        for each in (*graph.initializer, *(s.values for s in graph.sparse_initializer)):
            dtype = scope.dtypes[each.name] = self._name(each.data_type)
            self._stored[dtype] = self._stored.get(dtype, 0) + self._bytes(each)
            self._weight_faults += self._faults_of(each)
        for node in graph.node:
            self._nodes.append(self._node(node, scope))
            for attribute in node.attribute:
                for inner in (attribute.g, *attribute.graphs):
                    if inner.node:
                        self._read(inner, scope.inner())

    def _name(self, code: int) -> str:
        """Returns the name of a type as torch spells it; ``""`` for an unknown one."""
        name = str(self._onnx.TensorProto.DataType.Name(code)).lower()
        return {"undefined": "", "float": "float32", "double": "float64"}.get(name, name)

    def _bytes(self, tensor: Any) -> int:
        bits = re.search(r"\d+", self._name(tensor.data_type))  # of the first number: float8e4m3fn
        return int(math.prod(tensor.dims)) * int(bits[0] if bits else 8) // 8

    def _faults_of(self, tensor: Any) -> Iterator[str]:
        """Yields the faults of a weight. A mask of zeros and -inf has none."""
        is_external = tensor.data_location == self._onnx.TensorProto.EXTERNAL
        if tensor.data_type != self._onnx.TensorProto.FLOAT16 and not is_external:
            return
        try:
            values = self._onnx.numpy_helper.to_array(tensor, self._folder)
        except raised_here(Exception) as error:
            yield f"{tensor.name}: its values can't be read: {said_by(error)}"
            return
        if values.dtype != "float16":
            return
        is_infinite = abs(values) == math.inf
        is_mask = (values[is_infinite] < 0).all() and not values[~is_infinite].any()
        if is_infinite.any() and not is_mask:
            yield f"{tensor.name}: holds infinities in float16"

    def _node(self, node: Any, scope: _Scope) -> OnnxNode:
        metadata = {each.key: each.value for each in node.metadata_props}
        inputs = tuple(scope.dtypes.get(name, "") for name in node.input)
        outputs = tuple(scope.dtypes.get(name, "") for name in node.output)
        floats = [
            each for each in (*inputs, *outputs) if each in _BITS or each.startswith("float8")
        ]
        is_cast = node.op_type in {"Cast", "CastLike"}
        dtype = (outputs[0] if is_cast else next(iter(floats), "")) if floats else ""
        found = self._cast_faults(node, scope, inputs, outputs)
        faults = [*(found if is_cast else self._mixed(node, inputs))]
        decided = metadata.get(DTYPE, "")
        if decided and dtype and not is_cast and decided != dtype:
            faults.append(
                f"computes in {dtype}, and {metadata.get(REASON) or 'the policy'} says {decided}"
            )
        return OnnxNode(
            name=_label(node),
            op_type=node.op_type,
            op=metadata.get(OP, ""),
            module=module_of(metadata),
            location=metadata.get(LOCATION, ""),
            reason=metadata.get(REASON, ""),
            dtype=dtype,
            input_dtypes=inputs,
            output_dtypes=outputs,
            faults=tuple(faults),
            outputs=tuple(node.output),
        )

    def _mixed(self, node: Any, inputs: tuple[str, ...]) -> Iterator[str]:
        """Yields inputs that a node's schema, or an engine without implicit casts, rejects."""
        version = self._opsets.get(node.domain, 1)
        try:
            schema = self._onnx.defs.get_schema(node.op_type, version, node.domain)
        except self._onnx.defs.SchemaError:
            return
        allowed = {each.type_param_str: each.allowed_type_strs for each in schema.type_constraints}
        before: set[str] = set()
        for index, dtype in enumerate(inputs):
            if dtype not in _BITS:
                continue
            formal = schema.inputs[min(index, len(schema.inputs) - 1)]
            types = allowed.get(formal.type_str, [formal.type_str])
            if f"tensor({_onnx_name(dtype)})" not in types:
                yield f"{node.op_type} of opset {version} takes no {dtype} as {formal.name}"
            # Types differ where this input can't have the other one's, such as the scales of Resize.
            mixed = [each for each in before - {dtype} if f"tensor({_onnx_name(each)})" in types]
            if mixed:
                yield f"mixed inputs: {mixed[0]} and {dtype}"
                return
            if formal.is_homogeneous:
                before.add(dtype)

    def _cast_faults(
        self, node: Any, scope: _Scope, inputs: tuple[str, ...], outputs: tuple[str, ...]
    ) -> Iterator[str]:
        """Yields why a cast is needless."""
        source, dtype = node.input[0], outputs[0]
        if inputs[0] == dtype and dtype:
            yield f"needless cast: its input is {dtype} already"
        before, origin = scope.sources.get(source, (None, ""))
        if before is not None and origin == dtype in _BITS:
            kept = zip(_BITS.get(inputs[0], (0, 0)), _BITS[dtype], strict=True)
            if all(has >= needs for has, needs in kept):
                yield f"needless cast: {_label(before)} made {inputs[0]} of {dtype}"
        known = scope.casts.setdefault((source, dtype), node)
        if known is not node:
            yield f"needless cast: {_label(known)} casts the same tensor to {dtype}"
        scope.sources[node.output[0]] = node, inputs[0]


def _label(node: Any) -> str:
    """Returns a node's name, or its results' names."""
    return node.name or f"the node of {', '.join(node.output)}"


def _onnx_name(dtype: str) -> str:
    return {"float32": "float", "float64": "double"}.get(dtype, dtype)


def module_of(metadata: Mapping[str, str]) -> str:
    """Returns the qualified name of the module in a node's metadata, which torch's exporter wrote."""
    try:
        scopes = ast.literal_eval(metadata.get("pkg.torch.onnx.name_scopes", "[]"))
    except raised_here(ValueError, SyntaxError):
        return ""
    return str(scopes[-2]) if isinstance(scopes, list) and len(scopes) > 1 else ""
