"""`export`: writes a converted model as an ONNX file in which every node has its type."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import functools
import inspect
import math
import os
import re
import stat
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from .. import arguments, phases
from ..errors import HmpxError, OptionError, passing_over, raised_here, said_by, short
from ..files import unfinished_folder, unwritable
from ..forks import CachedProperty
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
from .passes import keep_wide, name_weights, store_low, upcast_outputs
from .values import MOST_ULPS, check_inputs, eager, errors

_OUTPUTS: Final = ("fp32", "keep")

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
    verify: bool = False,
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
        verify: Whether each node is also computed from torch's values, for its ``error``, in ulps ([ONNX](freeze.md#onnx)).
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
    if str(verify) == "file":
        raise OptionError(
            "verify='file' is gone: hmpx.exporting.verify(path, model, inputs) and `hmpx check FILE.onnx --model "
            "FILE.py:FUNCTION` compare a finished file"
        )
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
    with (
        _traced(
            *("export", model, inputs, conversion),
            dynamic_shapes=dynamic_shapes,
            opset_version=opset_version,
        ) as traced,
        unfinished_folder(target) as folder,
    ):
        program = traced.program
        name_weights(program)
        store_low(program.model.graph)
        in_force = current()
        is_typed = in_force is not None and in_force.options.legalize != "always"
        _annotate(program, traced.rows, is_typed=is_typed)
        if outputs == "fp32":
            upcast_outputs(program.model.graph)
        return _written(traced, folder, target, verify)


def verify(
    path: str | os.PathLike[str], model: nn.Module, inputs: Any, **conversion: Any
) -> OnnxFile:
    """Returns an ONNX file, with the errors of its nodes against a model that torch's exporter gives the same names.

    Args:
        path: The file, such as one of `export` or of ``torch.onnx.export(..., dynamo=True)``.
        model: The model, in evaluation mode.
        inputs: As for `export`.
        **conversion: As for `export`: arguments of `convert`, by which the model computes.

    Raises:
        OptionError: The file can't be read, has other inputs or other names than the model, or an argument is invalid.
    """
    check_names(verify, conversion)
    found = read_onnx(path)
    args, kwargs = arguments_of(inputs)
    named: dict[str, Any] = {}
    with passing_over(AttributeError, TypeError):  # not of a module, or as the call will say
        named = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    tensors = {name: each for name, each in named.items() if isinstance(each, Tensor)}
    check_inputs(Path(found.path), tensors, are_all=False)
    with _traced("exporting.verify", model, inputs, conversion) as traced:
        check_inputs(Path(found.path), traced.values, are_all=True)
        return traced.compared(found)


@dataclasses.dataclass(frozen=True)
class _Traced:
    """A model in torch's exporter: its program, the recorded calls, and the values that `keep_wide` changed."""

    program: Any
    rows: tuple[Row, ...]
    inputs: tuple[Tensor, ...]
    wide: set[str]

    @CachedProperty
    def values(self) -> dict[str, Tensor]:
        """Name of a node of torch.export -> its value."""
        return eager(self.program.exported_program, self.inputs)

    def compared(self, found: OnnxFile) -> OnnxFile:
        """Returns a file with the errors of its nodes."""
        differences, computed = errors(Path(found.path), self.values, self.wide)
        nodes, rest = [], []
        for node in found.nodes:
            error = max((differences[n] for n in node.outputs if n in differences), default=None)
            if node.dtype and computed.isdisjoint(node.outputs):
                rest.append(node.name)
            is_beyond = error is not None and error > MOST_ULPS.get(node.output_dtypes[0], math.inf)
            faults = (f"differs from torch by {error:.3g} ulps",) if is_beyond else ()
            nodes.append(dataclasses.replace(node, error=error, faults=node.faults + faults))
        return dataclasses.replace(
            found, nodes=tuple(nodes), not_compared=tuple(rest), about=about_run()
        )


@contextlib.contextmanager
def _traced(
    tool: str,
    model: nn.Module,
    inputs: Any,
    conversion: Mapping[str, Any],
    *,
    dynamic_shapes: Any = None,
    opset_version: int | None = None,
) -> Iterator[_Traced]:
    """Converts, calls the model, and has torch export it. Inside of the block the conversion is in force."""
    if not isinstance(model, nn.Module):
        raise OptionError(f"hmpx.{tool} takes a torch.nn.Module, not {type(model).__name__}")
    busy = next((each or "it" for each, part in model.named_modules() if part.training), None)
    if busy is not None:
        raise OptionError(
            f"{type(model).__name__} is in training mode ({busy}), so its dropout and batch norms would be exported as "
            f"for training; call model.eval() before hmpx.{tool}"
        )
    for package in ("onnx", "onnxscript"):
        imported(package, f"hmpx.{tool}")
    refuse_where_off(tool)
    args, kwargs = arguments_of(inputs)
    with contextlib.ExitStack() as stack:
        stack.enter_context(unchanged(model, inputs))
        session = current()
        is_deciding = session and (session.policy.decisions or session.policy.sections)
        given = tuple(tensors_of((args, kwargs)))
        if conversion or not is_deciding:
            device_types = {each.device.type for each in (*model.parameters(), *given)} or {"cpu"}
            stack.enter_context(convert(**{"device_types": device_types, **conversion}))
        stack.enter_context(torch.no_grad())
        with record() as report, _no_autocast(model):
            Steps(tool, model).forward(inputs)
        if opset_version is None and any(row.dtype == "bfloat16" for row in report.rows):
            opset_version = _BFLOAT16_OPSET
        program, wide = _exported(
            model, args, kwargs, dynamic_shapes=dynamic_shapes, opset_version=opset_version
        )
        opset = program.model.graph.opset_imports[""]
        if opset_version not in {None, opset}:
            raise OptionError(
                f"opset_version={opset_version}: torch exports this model in opset {opset}"
            )
        yield _Traced(program, report.rows, given, wide)


@contextlib.contextmanager
def _no_autocast(model: nn.Module) -> Iterator[None]:
    """Raises OptionError if a forward enters torch.autocast: torch's exporter would apply that instead of the lists."""
    enter: Any = torch.autocast.__enter__
    thread = threading.get_ident()

    @functools.wraps(enter)
    def entering(region: Any) -> Any:
        result = enter(region)
        if threading.get_ident() == thread and torch.is_autocast_enabled(region.device):
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


def _written(traced: _Traced, folder: Path, target: Path, is_verified: bool) -> OnnxFile:
    """Writes a program's files in a folder, reads them back, and moves them to their place."""
    phases.enter("file")
    try:
        traced.program.save(folder / target.name)
        found = read_onnx(folder / target.name, about_run())
        mixed = [each for each in found.faults if "mixed inputs" in each]
        if traced.wide and mixed:
            kept = "; ".join(found.kept_wide)
            raise OptionError(
                f"{mixed[0]}, as weights that float16 can't hold stay in float32 ({kept}); export with "
                "low_precision_type='bfloat16', or scale these weights"
            )
        if is_verified:
            phases.enter("values of nodes")
            found = traced.compared(found)
        # The weights first, since the graph refers to them.
        for each in sorted(folder.iterdir(), reverse=True):
            place = target.with_name(each.name)
            if place.is_file():
                each.chmod(stat.S_IMODE(place.stat().st_mode))
            each.replace(place)
    except raised_here(OSError) as error:
        raise unwritable(target, error) from error
    return dataclasses.replace(found, path=str(target))


def _exported(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], **options: Any
) -> tuple[Any, set[str]]:
    """Returns torch's ONNX program of a model, and the values that `keep_wide` changed."""
    import numpy

    phases.enter("torch.onnx.export")
    try:
        # The exporter calls functions that torch has deprecated, and casts weights by numpy.
        with warnings.catch_warnings(), numpy.errstate(over="ignore"):
            warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
            unoptimized: Any = {"dynamo": True, "verbose": False, "optimize": False}
            program: Any = torch.onnx.export(
                model, args, kwargs=dict(kwargs), **unoptimized, **options
            )
            wide = keep_wide(program.model)
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
        module = module_of(metadata)
        line = _location(metadata.get("pkg.torch.onnx.stack_trace", ""))
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
