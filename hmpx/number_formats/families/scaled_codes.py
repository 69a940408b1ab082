"""Codes of elements that share scales."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from ...errors import OptionError
from ...tensors import CAST
from ..bits import FP32, FP64, Binary
from ..codings import Coding
from ..layouts import Layout
from ..unpatched import DIV, EQ, LEFT, MUL, NE, RIGHT
from .fixed import Fixed
from .floats import Float
from .number_format import check_codes, code_dtype
from .scale_checks import check_scales, check_shape

if TYPE_CHECKING:
    from .scaled import Scaled
    from .tables import Table

_E4M3: Final = Float("e4m3", 4, 3, kind="fn")


def scaled_coding(element: Float | Fixed | Table) -> Coding | None:
    """Returns what kernels are told to make or read the codes of elements that share scales."""
    # `encoded` finds elements by their products with scales in float32, which must differ then.
    if isinstance(element, Float):
        coding: Coding | None = element.coding(FP32, keeps_sign_of_nan=False)
        differ = element.smallest_subnormal >= 2.0**-20 and element.significand_bits <= 20
    else:
        coding = element.coding(FP32)
        differ = element.epsilon >= 2.0**-20 * max(element.max, -element.min, 1.0)
    if coding is None:
        return None
    can_decode = coding.can_decode and element.bits <= (
        8 if isinstance(element, Float | Fixed) else 4
    )
    return Coding("scaled", coding.spec, differ, can_decode, coding.memory)


def encoded(format: Scaled, values: Tensor, rounded: Tensor, binary: Binary) -> tuple[Tensor, ...]:
    """Returns the codes of the elements, those of the scales, and the tensor's scale if it has one."""
    plan, layout, shape = format.exact_plan(binary.dtype), format.layout, values.shape
    rows = plan.split(layout.to_rows(values))
    scales_shape = format.shape_for(shape, layout)
    tensor_scale = None
    if format.tensor_scale:
        tensor_scale = format.scale(format.amax(values))
    if values.numel():
        block_scale = plan.block_scale(rows, tensor_scale)
    else:
        nothing = torch.zeros(scales_shape, dtype=torch.float32, device=values.device)
        block_scale = plan.scale(_by_block(nothing, layout))
    scale = block_scale if tensor_scale is None else MUL(tensor_scale, block_scale)
    exact = DIV(
        CAST[torch.float64](plan.split(layout.to_rows(rounded))), CAST[torch.float64](scale)
    )
    # The product was rounded to float32, so that the quotient is only near an element.
    elements = format.element_plan(FP64, "nearest").round(exact, None)
    elements = elements.masked_fill_(NE(elements, elements), math.nan)  # of one sign
    codes = plan.join(format.element.codes_of(elements, FP64), layout.to_rows(rounded))
    codes = layout.from_rows(codes, shape).to(code_dtype(format.element.bits))
    scales = layout.from_rows(block_scale.squeeze(-1), scales_shape).contiguous()
    parts = (codes.contiguous(), _scale_codes(format, scales))
    return parts if tensor_scale is None else (*parts, tensor_scale)


def _by_block(scales: Tensor, layout: Layout) -> Tensor:
    """Returns scales as they are multiplied with blocks."""
    rows = layout.to_rows(scales)
    return rows if layout.kind == "whole" else rows.unsqueeze(-1)


def _scale_codes(format: Scaled, scales: Tensor) -> Tensor:
    if format.scale_format == "float32":
        return scales
    if format.scale_format == "e4m3":
        return _E4M3.codes_of(scales, FP32).to(torch.uint8)
    return RIGHT(scales.view(torch.int32), 23).to(torch.uint8)


def decoded(format: Scaled, codes: Any) -> Tensor:
    """Returns the values that (codes, scales) or (codes, scales, tensor's scale) stand for.

    Raises:
        OptionError: ``codes`` are not as `encoded` returns them.
    """
    names = ("codes", "scales", *(("the tensor's scale",) if format.tensor_scale else ()))
    if not isinstance(codes, tuple | list) or len(codes) != len(names):
        raise OptionError(f"format {format.name}: decode takes ({', '.join(names)})")
    check_codes(codes[0], format.name)
    elements = CAST[torch.float32](format.element.decoded(codes[0]))
    layout, plan, shape = format.layout, format.exact_plan(torch.float32), elements.shape
    scales = _scales_of(format, codes[1], format.shape_for(shape, layout))
    scales = _by_block(scales, layout)
    if format.tensor_scale:
        scales = MUL(check_scales(codes[2], (), format.name), scales)
    if not elements.numel():
        return elements
    rows = layout.to_rows(elements)
    values = plan.join(MUL(plan.split(rows), scales), rows)
    return layout.from_rows(values, shape).contiguous()


def _scales_of(format: Scaled, codes: Any, shape: tuple[int, ...]) -> Tensor:
    if format.scale_format == "float32":
        return check_scales(codes, shape, format.name)
    check_codes(codes, format.name)
    check_shape(codes, shape, format.name)
    if format.scale_format == "e4m3":
        return _E4M3.decoded(codes)
    bits = LEFT(codes.to(torch.int32), 23)
    return bits.view(torch.float32).masked_fill(EQ(codes, 255), math.nan)
