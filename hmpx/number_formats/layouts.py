"""Layouts: the values of a tensor that are rounded together, and their arrangement as rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

from torch import Tensor

from ..errors import OptionError
from .unpatched import MOVEDIM

Kind: TypeAlias = Literal["rows", "columns", "tiles", "whole"]


class Grid(NamedTuple):
    """The memory layout of a tensor without gaps: ``[..., rows, mid, columns]``.

    Attributes:
        rows: See above; values that share a scale may be in several rows.
        mid: Elements between rows that belong together, in units of columns.
        columns: Adjacent elements.
        is_across: The axis of the layout is the rows', not the columns'.
    """

    rows: int
    mid: int
    columns: int
    is_across: bool


#: For values that are rounded separately.
NO_GRID: Final = Grid(1, 1, 1, False)


@dataclass(frozen=True)
class Layout:
    """The positions in a tensor of values that are rounded together.

    Attributes:
        kind: ``"rows"``: along the axis, all of it or parts. ``"columns"``: all with the same index on the
            axis. ``"tiles"``: along the axis and another one, the last or the second last. ``"whole"``: all.
        axis: The axis; ignored for ``"whole"``.
    """

    kind: Kind
    axis: int = -1

    def to_rows(self, x: Tensor) -> Tensor:
        """Returns ``x`` as rows: the axis last, or first for columns; may be a view. Checks the axis."""
        if self.kind == "whole":
            return x.reshape(-1)
        if x.dim() == 0:
            x = x.view(1)
        self.check(x.shape)
        if self.kind == "columns":
            moved = MOVEDIM(x, self.axis, 0)
            return moved.flatten(1) if x.dim() > 1 else moved.unsqueeze(-1)
        if self.kind == "rows":
            return MOVEDIM(x, self.axis, -1)
        if x.dim() == 1:
            return x.view(1, -1) if x.numel() else x.unsqueeze(0)
        return MOVEDIM(x, (self.other(x.dim()), self.axis), (-2, -1))

    def from_rows(self, rows: Tensor, shape: Sequence[int]) -> Tensor:
        """Returns rows as a tensor of the original shape; may be a view."""
        if not shape or self.kind == "whole":
            return rows.reshape(shape)
        if self.kind == "columns":
            moved = list(shape)
            moved.insert(0, moved.pop(self.axis))
            return MOVEDIM(rows.reshape(moved), 0, self.axis)
        if self.kind == "rows":
            return MOVEDIM(rows, -1, self.axis)
        if len(shape) == 1:
            return rows.squeeze(0)
        return MOVEDIM(rows, (-2, -1), (self.other(len(shape)), self.axis))

    @property
    def takes_strides(self) -> bool:
        """Whether there is a grid for any order of the axes in memory."""
        return self.kind in ("rows", "whole")

    def grid(self, x: Tensor) -> Grid:
        """Returns the grid of a tensor without gaps in memory. Checks the axis.

        It must be contiguous, unless the layout `takes_strides`.
        """
        shape = x.shape
        if self.kind == "whole":
            return Grid(1, 1, x.numel(), False)
        self.check(shape or (1,))
        if not shape:
            return NO_GRID
        axis, length = self.axis % len(shape), shape[self.axis]
        if self.kind == "rows":
            if length == 1:
                return Grid(1, 1, x.numel(), True)
            stride = x.stride(axis)
            return Grid(1, 1, length, False) if stride == 1 else Grid(length, 1, stride, True)
        before, after = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
        if self.kind == "columns":
            return (
                Grid(before, 1, length, True) if after == 1 else Grid(before, length, after, False)
            )
        if axis == len(shape) - 1:
            return Grid(shape[-2] if axis else 1, 1, length, False)
        return Grid(length, after // max(shape[-1], 1), shape[-1], True)

    def check(self, shape: Sequence[int]) -> None:
        """Raises `OptionError` if tensors of a shape lack the axis."""
        if not -len(shape) <= self.axis < len(shape):
            raise OptionError(
                f"blocks lie along axis {self.axis}, which a tensor of shape {tuple(shape)} lacks"
            )

    def other(self, dim: int) -> int:
        """Returns the other axis of tiles."""
        return -2 if self.axis in (-1, dim - 1) else -1
