"""Ops that select elements of a low-precision table: casts the result, and sums gradients in fp32.

Also fp32 gradients of other ops if only these lack a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from ..ops import parameter_named
from ..tensors import CAST, Args, Kwargs, tensors_in
from ..torch_internals import data_of, has_fake_tensors, has_tangents, is_jit_tracing, transforms
from .composition import Inputs, computed_in_fp32, is_traced, rounded

if TYPE_CHECKING:
    from .missing_kernels import Callee

# Read before anything is patched.
_copy_, _empty_strided = Tensor.copy_, torch.empty_strided
_eq, _item, _nonzero, _to = torch.eq, Tensor.item, torch.nonzero, Tensor.to
_index_select, _unique = torch.index_select, torch.unique

#: For smaller tables the cast is faster.
_LEAST: Final = 1 << 16

#: Ops that can run on the rows that a call reads alone -> the parameter with their indices.
_INDEX: Final = {
    "embedding": "indices",
    "embedding_bag": "indices",
    "index_select": "index",
}
#: They do if the table has at least this number of rows per index.
_FEW: Final = 4


def selected(  # noqa: PLR0917  # all there is to one call
    op: str,
    names: Sequence[str],
    function: Callable[..., Any],
    args: Args,
    kwargs: Kwargs,
    inputs: Inputs,
    dtype: torch.dtype,
) -> Any:
    """Returns the elements that ``function`` selects, in ``dtype``; None if the table must be upcast instead.

    The gradient is that of an fp32 table, since torch sums it in the table's dtype. Graphs, torch.func
    and tangents need the upcast.
    """
    table = inputs.first
    if argument("sparse", names, args, kwargs):  # a sparse gradient has no sums
        return rounded(function(*args, **kwargs), CAST[dtype], table.dtype)
    if table is not inputs.low or transforms() is not None or has_tangents():
        return None
    if not inputs.is_learning:
        return CAST[dtype](function(*args, **kwargs))
    if not inputs.is_plain or is_traced() or is_jit_tracing() or table.numel() < _LEAST:
        return None
    if op in _INDEX and table.device.type == "cpu" and not has_fake_tensors():
        few = _of_few_rows(op, names, args, kwargs, table)
        if few is not None:
            return computed_in_fp32(function, *_changed(few, names, args, kwargs), dtype)
    if op == "embedding_bag":  # it computes with the elements
        return None
    outline: Tensor = _Outline.apply(table)  # type: ignore[no-untyped-call]
    new_args, new_kwargs = _changed({names[0]: outline}, names, args, kwargs)
    result = function(*new_args, **new_kwargs)
    with torch.no_grad():  # the gradient of a selection does not need its values
        _copy_(data_of(result), function(*args, **kwargs))
    return CAST[dtype](result)


def with_fp32_gradients(callee: Callee, args: Args, kwargs: Kwargs, inputs: Inputs) -> Any:
    """Returns the result of torch's function, with the gradients of its fp32 kernel."""
    function, dtype, result = callee.function, inputs.first.dtype, None
    if callee.selects or callee.op in _INDEX:
        result = selected(callee.op, callee.names, function, args, kwargs, inputs, dtype)
    if result is None:
        result = computed_in_fp32(function, args, kwargs, dtype)
    if callee.selects or not inputs.is_plain or is_traced() or transforms() is not None:
        return result
    with torch.no_grad():
        values = function(*args, **kwargs)
    made = list(zip(tensors_in((result,)), tensors_in((values,)), strict=True))
    for tensor, value in made:
        if tensor.dtype is value.dtype is dtype:
            _copy_(data_of(tensor), value)
    kept = [tensor if tensor.dtype is dtype else value for tensor, value in made]
    return kept[0] if isinstance(result, Tensor) else tuple(kept)


def argument(name: str, names: Sequence[str], args: Args, kwargs: Kwargs) -> Any:
    """Returns the argument for a parameter; None if it is missing."""
    position = names.index(name) if name in names else len(args)
    return args[position] if position < len(args) else kwargs.get(name)


def _changed(
    changed: Mapping[str, Any], names: Sequence[str], args: Args, kwargs: Kwargs
) -> tuple[Args, Kwargs]:
    """Returns the arguments with the values of these parameters replaced."""
    new_args = tuple([changed.get(name, v) for name, v in zip(names, args, strict=False)])
    return new_args, {k: changed.get(parameter_named(k, names), v) for k, v in kwargs.items()}


def _of_few_rows(
    op: str, names: Sequence[str], args: Args, kwargs: Kwargs, table: Tensor
) -> dict[str, Any] | None:
    """Returns the changed arguments of a call on only the rows that it reads, each once; None for many rows."""
    given = dict(zip(names, args, strict=False))
    given |= {parameter_named(name, names): value for name, value in kwargs.items()}
    index, dim, padding = given.get(_INDEX[op]), given.get("dim", 0), given.get("padding_idx")
    if (
        not isinstance(index, Tensor)
        or index.dtype not in {torch.int64, torch.int32}
        or type(dim) is str
    ):
        return None
    if not 0 < index.numel() * _FEW <= table.shape[dim]:
        return None
    rows, inverse = _unique(index, return_inverse=True)
    few = {names[0]: _index_select(table, dim, rows), _INDEX[op]: _to(inverse, index.dtype)}
    if padding is None:
        return few
    if op == "embedding_bag" and padding < 0:  # -1 means no row in `embedding`
        padding += table.shape[dim]
    places = _nonzero(_eq(rows, padding))
    none = None if op == "embedding_bag" else -1
    return {**few, "padding_idx": _item(places) if places.numel() else none}


class _Outline(torch.autograd.Function):
    """A tensor of the table's shape without memory. Autograd rounds its fp32 gradient to the table's dtype."""

    drawn_as = "cast"

    @staticmethod
    def forward(ctx: Any, table: Tensor) -> Tensor:
        strides = [0] * table.dim()
        return _empty_strided(table.shape, strides, dtype=torch.float32, device=table.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
