"""Rows of tensors along the axis of blocks."""

from __future__ import annotations

from torch import Tensor

from ..errors import OptionError
from .kernels.calls import Rows


def rows_of(x: Tensor, axis: int) -> Rows:
    """Returns the length of rows along an axis, and the distance of neighbours in them.

    Args:
        x: Without memory between its elements.
        axis: Of ``x``.

    Raises:
        OptionError: ``x`` has no such axis.
    """
    shape = x.shape
    if not -max(len(shape), 1) <= axis < max(len(shape), 1):
        raise OptionError(
            f"blocks lie along axis {axis}, which a tensor of shape {tuple(shape)} lacks"
        )
    length = shape[axis] if shape else 1
    return (length, x.stride(axis)) if length > 1 else (length, 1)
