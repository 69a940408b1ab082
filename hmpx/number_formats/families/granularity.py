"""Granularity: which values of a tensor share a scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from torch import Tensor

from ...errors import OptionError, shown
from ..unpatched import PAD, PERMUTE
from .number_format import hint, listed

Granularity: TypeAlias = "Literal['tensor', 'row', 'column'] | int | tuple[int, int]"

_NAMES: Final = ("tensor", "row", "column")
_MOST_SIZE: Final = 65536


def checked_granularity(what: str, value: Any) -> Granularity:
    if isinstance(value, str) and value in _NAMES:
        return str.__str__(value)  # type: ignore[return-value]  # one of these
    if isinstance(value, (tuple, list)):
        if len(value) == 2 and all(map(_is_size, value)):
            return tuple(value)
    elif _is_size(value):
        return value  # type: ignore[no-any-return]  # checked
    raise OptionError(
        f"{what}: granularity must be one of {listed(_NAMES)}, a size from 1 to {_MOST_SIZE}, "
        f"or a pair of sizes, not {shown(value)}{hint(value, _NAMES)}"
    )


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MOST_SIZE


def block_shape(granularity: Granularity, axis: int, shape: Sequence[int]) -> list[int]:
    """Returns the extent of values that share a scale in each dimension; 0 for all of it."""
    dims = len(shape)
    if granularity == "tensor":
        return [0] * dims
    if not -dims <= axis < dims:
        raise OptionError(
            f"blocks lie along axis {axis}, which a tensor of shape {tuple(shape)} lacks"
        )
    found = [0 if granularity == "column" else 1] * dims
    if isinstance(granularity, tuple):
        other, granularity = granularity
        if dims > 1:
            found[-2 if axis % dims == dims - 1 else -1] = other
    found[axis] = granularity if isinstance(granularity, int) else int(granularity == "column")
    return found


def scales_shape(granularity: Granularity, axis: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of the scales of values of a shape."""
    if granularity == "tensor" or not shape:
        return ()
    sizes = block_shape(granularity, axis, shape)
    return tuple([-(-n // size) if size else 1 for n, size in zip(shape, sizes, strict=True)])


# --- for torch ops -------------------------------------------------------------------------------


def split(x: Tensor, granularity: Granularity, axis: int) -> Tensor:
    """Returns x, which must not be empty, with each dimension split in two: blocks, and a block's values.

    The last ones are padded with zeros.
    """
    shape = x.shape or (1,)
    sizes = [
        size if size == 1 else min(size, n) if size else n
        for n, size in zip(shape, block_shape(granularity, axis, shape), strict=True)
    ]
    missing = [-n % size for n, size in zip(shape, sizes, strict=True)]
    if any(missing):
        x = PAD(x, [each for size in reversed(missing) for each in (0, size)])
    blocks = [-(-n // size) for n, size in zip(shape, sizes, strict=True)]
    return x.reshape([each for pair in zip(blocks, sizes, strict=True) for each in pair])


def join(blocks: Tensor, like: Tensor) -> Tensor:
    """Returns blocks in the shape of ``like``: the inverse of `split`."""
    pairs = zip(blocks.shape[::2], blocks.shape[1::2], strict=True)
    x = blocks.reshape([count * size for count, size in pairs])
    for dim, size in enumerate(like.shape):
        if x.shape[dim] != size:
            x = x.narrow(dim, 0, size)
    return x.reshape(like.shape)


def noise_index(index: Tensor, x: Tensor, granularity: Granularity, axis: int) -> Tensor:
    """Returns the indices of the noise of x's elements, from those of all elements in order.

    The axis counts last, in columns first.
    """
    if granularity == "tensor" or x.dim() < 2:
        return index.view(x.shape)
    order = [dim for dim in range(x.dim()) if dim != axis % x.dim()]
    order.insert(0 if granularity == "column" else len(order), axis % x.dim())
    index = index.view([x.shape[dim] for dim in order])
    return PERMUTE(index, [order.index(dim) for dim in range(x.dim())])


# --- for kernels ---------------------------------------------------------------------------------


class Grid(NamedTuple):
    """A tensor's memory as kernels see it: ``[outer, rows, mid, columns]``."""

    rows: int
    mid: int
    columns: int
    height: int  # how many rows share a scale
    width: int  # how many columns do
    places: tuple[int, ...]  # the index of an element's noise: the factor of each dimension
    is_across: bool  # whether the axis is that of rows


def grid(x: Tensor, granularity: Granularity, axis: int) -> Grid:
    """Returns the grid of a tensor without gaps; for pairs and columns it must be contiguous."""
    count, sizes = x.numel(), block_shape(granularity, axis, x.shape or (1,))
    if granularity == "tensor" or x.dim() < 1:
        return Grid(1, 1, count, 1, count, (count, count, count, 1), False)
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    shape, sizes = [x.shape[dim] for dim in order], [sizes[dim] for dim in order]
    position, columns = order.index(axis % x.dim()), shape[-1]
    if granularity == "column":
        rows, columns = math.prod(shape[:position]), math.prod(shape[position + 1 :])
        if columns == 1:
            length = shape[position]
            return Grid(rows, 1, length, rows, 1, (rows * length, 1, rows * length, rows), True)
        places = 0, columns, rows * columns, 1
        return Grid(rows, shape[position], columns, rows, columns, places, False)
    row, is_across = min(position, x.dim() - 2), position != x.dim() - 1
    rows, height = (shape[row], sizes[row]) if row >= 0 else (1, 1)
    mid = math.prod(shape[row + 1 : -1])
    count = rows * mid * columns
    places = count, mid * columns, columns, 1
    if is_across:
        places = count, 1, rows * columns, rows
    width = min(sizes[-1] or columns, columns)
    return Grid(rows, mid, columns, height or rows, width, places, is_across)
