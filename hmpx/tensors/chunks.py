"""Tensors in one chunk of memory, such as the weights of an RNN, cast together.

cuDNN reads an RNN's weights from one chunk, where `torch.nn.RNNBase.flatten_parameters` puts them. Cast
one by one, each would have its own memory, and cuDNN would copy them into a chunk in each call, with a
warning.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from ..torch_internals import (
    FakeTensor,
    data_of,
    has_tangents,
    is_batch,
    is_graph_made,
    is_jit_tracing,
    is_noted_in_graph,
    transforms,
)
from .dtypes import CAST
from .nested import PLAIN_TENSORS

# Read before anything is patched: op lists may name any of them.
_as_strided, _is_neg, _storage = Tensor.as_strided, Tensor.is_neg, Tensor.untyped_storage
_offset, _stride, _numel = Tensor.storage_offset, Tensor.stride, Tensor.numel
_is_contiguous = Tensor.is_contiguous

_PLAIN: Final = PLAIN_TENSORS | {FakeTensor}

#: A chunk is cast as a whole only if at most this fraction of it belongs to no tensor.
_MOST_UNUSED: Final = 0.25


@dataclass(frozen=True, slots=True)
class Chunk:
    """The elements of a storage that some tensors span, and each tensor's position in them."""

    start: int  # the first element, as an offset in the storage
    length: int  # the number of elements
    #: For each tensor, its size, its strides and the offset of its first element.
    layouts: tuple[tuple[torch.Size, tuple[int, ...], int], ...]

    def elements(self, tensor: Tensor) -> Tensor:
        """Returns all elements; takes one of the tensors."""
        return _as_strided(tensor, (self.length,), (1,), self.start)

    def parts(self, elements: Tensor) -> list[Tensor]:
        """Returns tensors with the chunk's layout in ``elements``, another storage.

        Each has its own version counter, like the originals: for autograd, a write to one is not a
        write to the others.
        """
        parts = [_as_strided(elements, *layout) for layout in self.layouts]
        return parts if is_graph_made() else list(map(data_of, parts))


def chunk_of(tensors: Sequence[Tensor]) -> Chunk | None:
    """Returns the chunk that contains strided tensors of one dtype; None if they share none."""
    if len(tensors) < 2:
        return None
    storage = _storage(tensors[0])._cdata
    if any([_storage(tensor)._cdata != storage for tensor in tensors[1:]]):  # noqa: C419  # twice as fast
        return None
    dtype = tensors[0].dtype
    if any([tensor.dtype is not dtype or _is_neg(tensor) for tensor in tensors]):  # noqa: C419
        return None
    starts, counts = [int(_offset(tensor)) for tensor in tensors], list(map(_numel, tensors))
    ends = [
        start + (count if _is_contiguous(tensor) else _span(tensor))
        for tensor, start, count in zip(tensors, starts, counts, strict=True)
    ]
    first = min(starts)
    # cuDNN expects room for biases behind the weights, even of an RNN without biases.
    length = (_storage(tensors[0]).nbytes() // dtype.itemsize if first == 0 else max(ends)) - first
    if length - sum(counts) > _MOST_UNUSED * length:
        length = max(ends) - first
    if 0 in counts or length - sum(counts) > _MOST_UNUSED * length:
        return None
    layouts = [
        (tensor.shape, _stride(tensor), start - first)
        for tensor, start in zip(tensors, starts, strict=True)
    ]
    return Chunk(first, length, tuple(layouts))


def _span(tensor: Tensor) -> int:
    """Returns how many elements lie between the first and the last of ``tensor``, inclusive."""
    return 1 + sum([(n - 1) * step for n, step in zip(tensor.shape, _stride(tensor), strict=True)])


def cast_as_one(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor] | None:
    """Returns ``tensors`` in ``dtype``, in a new chunk with the same layout; None if they share none.

    Values and gradients are the same as if they were cast one by one.
    """
    if torch.compiler.is_dynamo_compiling() or len(tensors) < 2:
        return None
    if any([type(t) not in _PLAIN or t.layout is not torch.strided for t in tensors]):  # noqa: C419
        return None
    if transforms() is not None or has_tangents() or is_jit_tracing() or is_noted_in_graph():
        return None
    if any([is_batch(t) for t in tensors]):  # noqa: C419
        return None
    chunk = chunk_of(tensors)
    if chunk is None or tensors[0].dtype is dtype:
        return None
    if torch.is_grad_enabled() and any([t.requires_grad for t in tensors]):  # noqa: C419
        return list(_CastAsOne.apply(chunk, dtype, *tensors))  # type: ignore[no-untyped-call]
    return chunk.parts(CAST[dtype](chunk.elements(tensors[0])))


class _CastAsOne(torch.autograd.Function):
    drawn_as = "cast"

    @staticmethod
    def forward(ctx: Any, chunk: Chunk, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtype = tensors[0].dtype
        cast = chunk.parts(CAST[dtype](chunk.elements(tensors[0])))
        constant = [low for low, t in zip(cast, tensors, strict=True) if not t.requires_grad]
        ctx.mark_non_differentiable(*constant)
        return tuple(cast)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [gradient for gradient in gradients if gradient is not None]
        cast = cast_as_one(given, ctx.dtype) or map(CAST[ctx.dtype], given)
        found = iter(cast)
        return None, None, *[None if each is None else next(found) for each in gradients]


def is_in_memory(tensor: Tensor) -> bool:
    """Whether a tensor's values equal the contents of its memory, for code that reads it by address.

    False for negated views, and for tensors of known zeros, which have no memory.
    """
    return not (_is_neg(tensor) or tensor._is_zerotensor())


def cast_any_layout(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Returns a cast to ``dtype`` that accepts gradients of any layout.

    Torch's own casts accept only gradients of the tensor's layout.
    """
    return functools.partial(_CastAnyLayout.apply, dtype)


class _CastAnyLayout(torch.autograd.Function):
    drawn_as = "cast"
    generate_vmap_rule = True

    @staticmethod
    def forward(dtype: torch.dtype, tensor: Tensor) -> Tensor:
        return CAST[dtype](tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.dtype, Tensor], output: Tensor) -> None:
        ctx.dtype = inputs[1].dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, CAST[ctx.dtype](gradient)
