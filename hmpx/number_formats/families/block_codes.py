"""Values of the codes of blocks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...errors import OptionError
from ...tensors import CAST
from ..bits import FP64
from ..unpatched import ADD, EQ, LEFT, MUL, SUB
from .number_format import check_codes

if TYPE_CHECKING:
    from .blocks import Block


def decoded(format: Block, codes: Any) -> Tensor:
    """Returns the values that the pair (codes, scales) stands for, in float32.

    Raises:
        OptionError: ``codes`` are not as `Block.encoded` returns them.
    """
    if not isinstance(codes, tuple | list) or len(codes) != 2:
        raise OptionError(f"format {format.name}: decode takes the pair (codes, scales)")
    for part in codes:
        check_codes(part, format.name)
    codes, scales = codes
    elements = format.element.decoded(codes)
    if is_scalar := elements.dim() == 0:
        elements, scales = elements.view(1), scales.view(1)
    axis = -1 if is_scalar else format.axis
    length = elements.shape[axis]
    expected = format.scale_shape(elements.shape)
    if tuple(scales.shape) != expected:
        raise OptionError(
            f"format {format.name}: codes of shape {tuple(codes.shape)} have scales of shape "
            f"{expected}, not {tuple(scales.shape)}"
        )
    exponent = SUB(scales.to(torch.int64), 127)
    power = LEFT(ADD(exponent, FP64.bias), FP64.mantissa).view(torch.float64)
    power = power.masked_fill_(EQ(scales, 255), math.nan)
    power = power.repeat_interleave(format.size, axis).narrow(axis, 0, length)
    values = CAST[torch.float32](MUL(CAST[torch.float64](elements), power))
    return values.view(()) if is_scalar else values
