"""Layouts: which values of a tensor are rounded together, and how they become rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from ..errors import OptionError
from .unpatched import MOVEDIM

Kind: TypeAlias = Literal["rows", "columns", "tiles", "whole"]


@dataclass(frozen=True)
class Layout:
    """How the values that are rounded together lie in a tensor.

    Attributes:
        kind: ``"rows"``: along the axis, in all of it or in parts. ``"columns"``: all that have the same
            place on the axis. ``"tiles"``: along the axis and one more, the last but one or the last.
            ``"whole"``: all of them.
        axis: The axis; of no account for ``"whole"``.
    """

    kind: Kind
    axis: int = -1

    def to_rows(self, x: Tensor) -> Tensor:
        """Returns ``x`` as rows: the axis last, or first for columns; perhaps a view.

        Raises:
            OptionError: ``x`` has no such axis.
        """
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
        """Returns rows as a tensor of the shape that they had; perhaps a view."""
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

    def rows_in_memory(self, x: Tensor) -> tuple[int, int] | None:
        """Returns the length of the rows of a contiguous tensor, and for tiles how many a matrix has.

        None unless they lie one after the other in memory.
        """
        dim = x.dim()
        if self.kind == "whole":
            return x.numel(), 1
        if not dim or not x.numel() or not -dim <= self.axis < dim:
            return None
        if self.kind == "columns":
            return (x.numel() // x.shape[0], 1) if self.axis in (0, -dim) else None
        if self.axis not in (-1, dim - 1):
            return None
        return x.shape[-1], x.shape[-2] if self.kind == "tiles" and dim > 1 else 1

    def check(self, shape: Sequence[int]) -> None:
        """Checks that tensors of a shape have the axis.

        Raises:
            OptionError: They have not.
        """
        if not -len(shape) <= self.axis < len(shape):
            raise OptionError(
                f"blocks lie along axis {self.axis}, which a tensor of shape {tuple(shape)} lacks"
            )

    def other(self, dim: int) -> int:
        """Returns the other axis of tiles."""
        return -2 if self.axis in (-1, dim - 1) else -1
