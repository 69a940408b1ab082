"""Checks of scales, and of what shares one."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor

from ...arguments import is_a
from ...errors import OptionError, shown
from ...tensors import CAST, SPARSE
from .number_format import hint, listed

Granularity: TypeAlias = "Literal['tensor', 'row', 'column'] | int | tuple[int, int]"

_GRANULARITIES: Final = ("tensor", "row", "column")
_MOST_SIZE: Final = 65536


def check_floating(x: object, function: str) -> None:
    """Checks that a tensor can be rounded.

    Raises:
        OptionError: It is not a dense tensor of a floating type that `quantize` takes.
    """
    if not isinstance(x, Tensor):
        raise OptionError(f"{function} takes a tensor, not {type(x).__name__}")
    if x.dtype not in CAST or x.layout in SPARSE:
        what = x.layout if x.layout in SPARSE else x.dtype
        raise OptionError(
            f"{function} takes dense tensors of {', '.join(map(str, CAST))}, not of {what}"
        )


def check_scales(scales: object, shape: tuple[int, ...], name: str) -> Tensor:
    """Returns scales in float32.

    Raises:
        OptionError: They are not a floating tensor of that shape.
    """
    if not isinstance(scales, Tensor) or not scales.is_floating_point():
        what = scales.dtype if isinstance(scales, Tensor) else type(scales).__name__
        raise OptionError(f"format {name}: scales must be a floating tensor, not {what}")
    check_shape(scales, shape, name)
    return CAST[torch.float32](scales)


def check_shape(scales: Tensor, shape: tuple[int, ...], name: str) -> None:
    """Checks the shape of scales.

    Raises:
        OptionError: It is another.
    """
    if tuple(scales.shape) != shape:
        raise OptionError(
            f"format {name}: scales must be of shape {shape}, not {tuple(scales.shape)}"
        )


def checked_granularity(what: str, value: object) -> Granularity:
    """Returns what shares a scale, checked.

    Raises:
        OptionError: It is nothing that can.
    """
    if is_a(value, str) and str.__str__(value) in _GRANULARITIES:
        return str.__str__(value)  # type: ignore[return-value]  # one of these
    if is_a(value, (tuple, list)):
        sizes: tuple[int, int] = tuple(value)  # type: ignore[arg-type, assignment]  # checked below
        if len(sizes) == 2 and all(map(_is_size, sizes)):
            return sizes
    elif _is_size(value):
        return value  # type: ignore[return-value]  # checked
    raise OptionError(
        f"{what}: granularity must be one of {listed(_GRANULARITIES)}, a size from 1 to {_MOST_SIZE}, "
        f"or a pair of sizes, not {shown(value)}{hint(value, _GRANULARITIES)}"
    )


def _is_size(value: object) -> bool:
    return is_a(value, int) and not is_a(value, bool) and 1 <= value <= _MOST_SIZE  # type: ignore[operator]
