"""Calls with other batches: where the rows of a batch are in a call's tensors, and arguments with other rows.

The model also runs on the last row of its batch. Sizes that differ between both runs follow the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..observers import CallTensors
from ..tensors import SEQUENCES, map_tensors, with_items

Arguments: TypeAlias = "tuple[tuple[Any, ...], Mapping[str, Any]]"


class UnknownRowsError(Exception):
    """The rows of the batch can't be found in a call's tensors; the message is the end of a sentence."""


@dataclass(frozen=True)
class OneRow:
    """A call of the run on one row: its arguments, and its result."""

    arguments: Arguments
    result: Any

    @classmethod
    def of(cls, tensors: CallTensors) -> OneRow:
        """Returns the call with copies of its tensors, to which the program may write; not of parameters."""
        kwargs = {name: map_tensors(each, _kept) for name, each in tensors.given_kwargs.items()}
        arguments = map_tensors(tensors.given, _kept), kwargs
        return cls(arguments, map_tensors(tensors.result, _kept))


def _kept(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, torch.nn.Parameter) else tensor.detach().clone()


@dataclass(frozen=True)
class Rows:
    """The dimension of a tensor along which the rows of the batch lie.

    Attributes:
        dim: The dimension.
        size: How many elements along it belong to a row.
        is_outer: Whether these are neighbours, as in ``[batch * time]``; else ``[time * batch]``.
        one: The tensor in the run on one row.
    """

    dim: int
    size: int
    is_outer: bool
    one: Tensor

    def of(self, tensor: Tensor, index: Sequence[int]) -> Tensor:
        """Returns a copy of ``tensor`` with the rows in ``index``, in its order of dimensions in memory."""
        sizes = (-1, self.size) if self.is_outer else (self.size, -1)
        apart: Tensor = tensor.unflatten(self.dim, sizes)  # type: ignore[no-untyped-call]
        place = torch.tensor(index, device=tensor.device)
        found = apart.index_select(self.dim + (not self.is_outer), place)
        like = self.one if len(index) == 1 else tensor
        return _laid_out(found.flatten(self.dim, self.dim + 1), like)


def _laid_out(values: Tensor, like: Tensor) -> Tensor:
    order = sorted(range(like.dim()), key=lambda dim: -like.stride()[dim])
    inverse = [order.index(dim) for dim in range(len(order))]
    return values.permute(order).contiguous().permute(inverse)


def rows_of(full: Tensor, one: Tensor, batch: int) -> Rows | None:
    """Returns where the rows are in a tensor of the whole batch; None if there are none.

    Args:
        full: The tensor.
        one: The same in the run on the last row.
        batch: The number of rows.

    Raises:
        UnknownRowsError: Its shape does not follow the batch.
    """
    if full.dim() != one.dim() or full.layout is not torch.strided:
        raise UnknownRowsError("the shapes of its tensors do not follow the batch")
    differing = [dim for dim in range(full.dim()) if full.shape[dim] != one.shape[dim]]
    if not differing:
        return None
    dim = differing[0]
    if len(differing) > 1 or full.shape[dim] != batch * one.shape[dim] or not full.numel():
        raise UnknownRowsError("the shapes of its tensors do not follow the batch")
    found = [Rows(dim, one.shape[dim], is_outer, one) for is_outer in (True, False)]
    if one.shape[dim] == 1:
        return found[0]
    return min(found, key=lambda each: _distance(each.of(full, [batch - 1]), one))


def _distance(a: Tensor, b: Tensor) -> float:
    wide = torch.complex128 if a.is_complex() else torch.float64
    return float((a.to(wide) - b.to(wide)).abs().nan_to_num(0.0, 0.0, 0.0).sum())


class BatchedCall:
    """A call on the whole batch, to be repeated with other rows.

    Attributes:
        has_rows: Whether any of its arguments has rows.
        has_fixed_size: Whether a number among them can't be derived for larger batches.
    """

    def __init__(self, arguments: Arguments, one: Arguments, batch: int) -> None:
        """Finds the rows in the arguments; raises `UnknownRowsError`."""
        self._arguments, self._one = arguments, one
        self._batch = batch
        self.has_rows = self.has_fixed_size = False
        self._rows: dict[int, Rows | None] = {}
        (args, kwargs), (one_args, one_kwargs) = arguments, one
        if kwargs.keys() != one_kwargs.keys():
            raise UnknownRowsError("its arguments do not follow the batch")
        self._changed(list(args), list(one_args), None)
        for name in kwargs:
            self._changed(kwargs[name], one_kwargs[name], None)

    def with_rows(self, index: Sequence[int]) -> Arguments:
        """Returns the arguments with the rows in ``index``; new tensors where they have rows."""
        (args, kwargs), (one_args, one_kwargs) = self._arguments, self._one
        changed = self._changed(list(args), list(one_args), index)
        named = {name: self._changed(kwargs[name], one_kwargs[name], index) for name in kwargs}
        return tuple(changed), named

    def _changed(self, full: Any, one: Any, index: Sequence[int] | None) -> Any:
        """Returns an argument with other rows; without an index it finds the rows."""
        if isinstance(full, Tensor) and isinstance(one, Tensor):
            if index is None:
                self._find(full, one)
                return full
            rows = self._rows[id(full)]
            return full if rows is None else rows.of(full, index)
        if isinstance(full, SEQUENCES) and isinstance(one, SEQUENCES):
            if len(full) != len(one):
                raise UnknownRowsError("the number of its tensors follows the batch")
            items = [self._changed(a, b, index) for a, b in zip(full, one, strict=True)]
            return with_items(full, items)
        if isinstance(full, Tensor) or isinstance(one, Tensor):
            raise UnknownRowsError("its arguments do not follow the batch")
        if isinstance(full, int | float) and isinstance(one, int | float) and full != one:
            step, rest = divmod(full - one, self._batch - 1)
            self.has_fixed_size |= bool(rest) or isinstance(full, float)
            if index is not None:
                return one if len(index) == 1 else one + step * (len(index) - 1)
        return full

    def _find(self, full: Tensor, one: Tensor) -> None:
        rows = rows_of(full, one, self._batch)
        is_data = full.is_floating_point() or full.is_complex()
        if rows is not None and not is_data:  # such as places in a flattened batch
            is_same = torch.equal(rows.of(full, [self._batch - 1]), one)
            if not is_same:
                raise UnknownRowsError("its integers depend on the batch")
        self._rows[id(full)] = rows
        self.has_rows |= rows is not None


def as_values(arguments: Arguments, function: Callable[[Tensor], Tensor]) -> Arguments:
    """Returns arguments with each tensor replaced by the result of ``function``."""
    args, kwargs = arguments
    return map_tensors(args, function), {
        name: map_tensors(each, function) for name, each in kwargs.items()
    }
