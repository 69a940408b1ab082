"""The building block of low precision: upcast rounded inputs to fp32, compute, round the result."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from ..tensors import (
    CAST,
    ELIGIBLE,
    LOW_DTYPES,
    PLAIN_TENSORS,
    SEQUENCES,
    SPARSE,
    Args,
    Kwargs,
    cast_any_layout,
    cast_as_one,
    is_low,
    map_tensors,
    tensors_in,
    with_items,
)
from ..torch_internals import (
    CAN_KEEP_CASTS,
    Later,
    dispatch_modes,
    has_tangents,
    is_graph_made,
    is_jit_tracing,
    is_planned,
    may_learn,
    passes_for_real,
    run_when_traced,
)
from ..torch_state import is_below_dispatcher, is_off

# Read before anything is patched: op lists may name any of them.
widen = CAST[torch.float32]
_add, _sub, _gt, _ne, _where = torch.add, torch.sub, torch.gt, torch.ne, torch.where
_contiguous, _t, _to, _transpose = Tensor.contiguous, Tensor.t, Tensor.to, Tensor.transpose
_STRIDED = torch.strided
_widen = widen  # for functions with an argument of this name


@dataclass(slots=True)
class Inputs:
    """Facts about a call's floating-point inputs, gathered in one pass."""

    first: Tensor
    low: Tensor | None = None  # the first in low precision
    is_learning: bool = False  # some input requires a gradient, and gradients are recorded
    is_plain: bool = True  # all are dense tensors of torch's own classes


def inputs_of(args: Args, kwargs: Kwargs) -> Inputs | None:
    """Returns facts about the floating-point inputs, also inside lists; None if there are none."""
    found: Inputs | None = None
    for value in (*args, *kwargs.values()) if kwargs else args:
        for tensor in value if isinstance(value, SEQUENCES) else (value,):
            if not isinstance(tensor, Tensor):
                continue
            dtype = tensor.dtype
            if dtype not in ELIGIBLE:
                continue
            if found is None:
                found = Inputs(tensor)
            if found.low is None and dtype in LOW_DTYPES:
                found.low = tensor
            found.is_learning = found.is_learning or tensor.requires_grad
            is_dense = tensor.layout is _STRIDED and not tensor.is_nested
            if not is_dense or (type(tensor) not in PLAIN_TENSORS and not passes_for_real(tensor)):
                found.is_plain = False
    if found is not None and found.is_learning:
        found.is_learning = torch.is_grad_enabled()
    return found


def names_dtype(args: Args, kwargs: Kwargs) -> bool:
    """Whether a call names the dtype of its result.

    A quantized dtype given by keyword instead selects the computation, as in ``torch.quantized_lstm``.
    """
    named = kwargs.get("dtype")
    return named not in _NOT_OF_RESULTS or torch.dtype in map(type, args)


_NOT_OF_RESULTS: Final = frozenset({None, torch.qint8, torch.quint8, torch.qint32})


def computed_in_fp32(
    function: Callable[..., Any], args: Args, kwargs: Kwargs, dtype: torch.dtype
) -> Any:
    """Returns the result of ``function`` on inputs upcast to fp32, rounded to ``dtype``."""
    inputs = tensors_in((*args, *kwargs.values()))
    is_sparse = any([t.layout in SPARSE for t in inputs])  # noqa: C419  # Dynamo traces lists better
    upcast = cast_any_layout(torch.float32) if is_sparse else widen
    return rounded(call_raised(function, args, kwargs, upcast), CAST[dtype])


def call_raised(
    function: Callable[..., Any],
    args: Args,
    kwargs: Kwargs,
    widen: Callable[[Tensor], Tensor],
    dtypes: frozenset[torch.dtype] = LOW_DTYPES,
) -> Any:
    """Returns the result of ``function`` with tensors of ``dtypes`` upcast by ``widen``."""
    new_args = [raised(value, widen, dtypes) for value in args]
    named = {name: raised(value, widen, dtypes) for name, value in kwargs.items()}
    return function(*new_args, **named)


def raised(
    value: Any, widen: Callable[[Tensor], Tensor], dtypes: frozenset[torch.dtype] = LOW_DTYPES
) -> Any:
    """Returns ``value`` with its tensors of ``dtypes`` upcast by ``widen``."""
    if isinstance(value, Tensor):
        return widen(value) if value.dtype in dtypes else value
    if isinstance(value, SEQUENCES) and any([isinstance(item, Tensor) for item in value]):  # noqa: C419
        # Tensors that are tracked by address must not be cast as one chunk.
        if widen is _widen and all([getattr(t, "dtype", None) in dtypes for t in value]):  # noqa: C419
            chunk = cast_as_one(value, torch.float32)
            if chunk is not None:
                return with_items(value, chunk)
        return with_items(value, [raised(item, widen, dtypes) for item in value])
    return value


def rounded(
    value: Any, convert: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32
) -> Any:
    """Returns ``value`` with its tensors of ``dtype`` rounded by ``convert``."""
    if isinstance(value, Tensor):
        return convert(value) if value.dtype is dtype else value
    return map_tensors(value, lambda tensor: convert(tensor) if tensor.dtype is dtype else tensor)


def widen_matrices(tensor: Tensor) -> Tensor:
    """Returns ``tensor`` in fp32, with matrices in a layout that products don't need to copy."""
    if tensor.dim() < 3 or tensor.is_contiguous():
        return widen(tensor)
    if tensor.stride(-1) <= tensor.stride(-2):
        return _to(tensor, torch.float32, memory_format=torch.contiguous_format)
    transposed = _transpose(tensor, -2, -1)
    return _transpose(_to(transposed, torch.float32, memory_format=torch.contiguous_format), -2, -1)


def folding(matmul: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Makes a product of one matrix, or vector, with a batch of matrices the same whether or not it requires a gradient.

    torch folds the batch into one matrix if it does, else only where that needs no copy. Then sums may come in another
    order, and casts require no gradient under `torch.no_grad`. Here every batch is folded.
    """

    def product(*args: Any, **kwargs: Any) -> Tensor:
        if len(args) != 2 or kwargs or torch.compiler.is_dynamo_compiling():
            return matmul(*args, **kwargs)
        a, b = args
        are_plain = type(a) in PLAIN_TENSORS and type(b) in PLAIN_TENSORS
        if not are_plain or (a.dim() > 2) == (b.dim() > 2) or a.is_nested or b.is_nested:
            return matmul(a, b)
        if a.dim() > 2:
            return matmul(_foldable(a), b)
        if a.dim() < 2:
            return matmul(_foldable(_transpose(b, -2, -1)), a)
        product = matmul(_foldable(_transpose(b, -2, -1)), _t(a))
        return _contiguous(_transpose(product, -2, -1))

    return product


def _foldable(batch: Tensor) -> Tensor:
    """Returns a batch of matrices that is one matrix in another shape."""
    if batch.layout is not _STRIDED:
        return batch
    shape, strides = batch.shape, batch.stride()
    rows = range(batch.dim() - 2)
    is_one = all([strides[i] == strides[i + 1] * shape[i + 1] for i in rows])  # noqa: C419
    return batch if is_one else _contiguous(batch)


def rounding_last(
    function: Callable[..., Any], names: tuple[str, ...], device_types: frozenset[str]
) -> Callable[..., Any]:
    """Makes ``function`` compute in fp32 first if a call has a low-precision ``dtype=``.

    torch's kernels cast the input to that dtype first: an attention mask filled with fp32's least
    number becomes -inf in bfloat16, and a softmax of only -inf is NaN. ``names`` are the parameters by
    position. It applies to float32 inputs on these device types.
    """
    position = names.index("dtype") if "dtype" in names else len(names)

    @functools.wraps(function, updated=())
    def rounded_last(*args: Any, **kwargs: Any) -> Any:
        is_named = "dtype" in kwargs
        if not is_named and len(args) <= position:
            return function(*args, **kwargs)
        dtype = kwargs["dtype"] if is_named else args[position]
        tensors = (value for value in (*args[:1], *kwargs.values()) if isinstance(value, Tensor))
        given = next(tensors, None)
        if (
            not is_low(dtype)
            or not isinstance(given, Tensor)
            or given.dtype is not torch.float32
            or given.device.type not in device_types
            or kwargs.get("out") is not None
            or is_below_dispatcher()
            or is_off()
        ):
            return function(*args, **kwargs)
        if is_named:
            result = function(*args, **{**kwargs, "dtype": torch.float32})
        else:
            result = function(*args[:position], torch.float32, *args[position + 1 :], **kwargs)
        return CAST[dtype](result)

    return rounded_last


def traced() -> str:
    """Returns the kind of trace that the call becomes part of: ``"graph"``, ``"export"``, ``"jit"``, or empty.

    A graph is traced by Dynamo or its backends. An exported graph, and a trace of torch.jit, become files.
    """
    if torch.compiler.is_dynamo_compiling():
        return "export" if torch.compiler.is_exporting() else "graph"
    if is_jit_tracing():
        return "jit"
    if not dispatch_modes() or not is_graph_made() or is_planned():
        return ""
    return "export" if torch.compiler.is_exporting() or is_onnx_made() else "graph"


#: The results of `traced` for files, which may run on any hardware.
FOR_FILES: Final = ("export", "jit")


def is_traced() -> bool:
    """Whether the call becomes part of a graph, traced by Dynamo or by its backends."""
    return traced() in ("graph", "export")


def is_exported() -> bool:
    """Whether the call becomes part of an exported file, which may run on any hardware."""
    return traced() in FOR_FILES


def is_onnx_made() -> bool:
    """Whether the call becomes part of an ONNX file."""
    onnx = sys.modules.get("torch.onnx")
    return onnx is not None and onnx.is_in_onnx_export()


# Like `torch.compiler.assume_constant_result`, which imports Dynamo: inside it, torch denies the export.
vars(is_onnx_made)["_dynamo_marked_constant"] = True


def are_casts_kept() -> bool:
    """Whether inductor is configured to round where eager mode does."""
    config = sys.modules.get(Later.INDUCTOR_CONFIG)
    return CAN_KEEP_CASTS and config is not None and config.emulate_precision_casts is True


run_when_traced(are_casts_kept)


def in_graph(
    function: Callable[..., Any],
    args: Args,
    kwargs: Kwargs,
    dtype: torch.dtype,
    accumulate_dtype: torch.dtype = torch.float32,
) -> Any:
    """Computes a low-precision call in ``accumulate_dtype``, with rounding to ``dtype`` that stays in the graph."""
    # Functions with their own backward have no forward-mode gradient; casts have both.
    keeps_casts = are_casts_kept() or has_tangents()

    def raise_one(tensor: Tensor) -> Tensor:
        if tensor.dtype in LOW_DTYPES and not keeps_casts:
            tensor = _cast(tensor, tensor.dtype, torch.float32)
        return CAST[accumulate_dtype](tensor)

    def convert(tensor: Tensor) -> Tensor:
        if dtype not in LOW_DTYPES or keeps_casts:
            return CAST[dtype](tensor)
        return _cast(widen(tensor), dtype, dtype)

    result = call_raised(function, args, kwargs, raise_one, ELIGIBLE)
    return rounded(result, convert, accumulate_dtype)


def _cast(tensor: Tensor, low: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Returns ``tensor`` in ``dtype``, rounded to ``low``; its gradient is rounded too."""
    if may_learn(tensor):
        return _CastNode.apply(tensor, low, dtype)  # type: ignore[no-any-return, no-untyped-call]
    return CAST[dtype](round_fp32(widen(tensor), low))


class _CastNode(torch.autograd.Function):
    drawn_as = "cast"

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, low: torch.dtype, dtype: torch.dtype) -> Tensor:
        return CAST[dtype](round_fp32(widen(tensor), low))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.dtype, ctx.low = inputs[0].dtype, inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return CAST[ctx.dtype](round_fp32(widen(gradient), ctx.low)), None, None


def round_fp32(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns float32 ``tensor`` rounded to a low-precision ``dtype``, without a cast or a gradient.

    Rounds to nearest, ties to even, like the cast; NaN stays NaN.
    """
    bits = tensor.view(torch.int32)
    is_nan = _ne(tensor, tensor)  # inductor's C++ evaluates `isnan` one element at a time
    if dtype is torch.bfloat16:
        # Add half a unit in the last place minus one, plus one if the last place is odd.
        whole = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        return _where(is_nan, tensor, whole.view(torch.float32))
    # Adding 2**13 times the largest power of two not above it leaves float16's ten mantissa bits;
    # below float16's smallest normal number the power stays that of 2**-14.
    exponent = (bits & 0x7F800000).clamp(113 << 23, 143 << 23)
    power = (exponent + (13 << 23)).view(torch.float32)
    magnitude = (bits & 0x7FFFFFFF).view(torch.float32)
    magnitude = _sub(_add(magnitude, power), power)
    magnitude = _where(_gt(magnitude, 65504.0), float("inf"), magnitude)
    magnitude = _where(is_nan, tensor, magnitude)
    return (magnitude.view(torch.int32) | (bits & -0x80000000)).view(torch.float32)
