"""Formats whose elements share scales: their codes, and the rules for powers of two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import torch
from torch import Tensor

from ...errors import OptionError
from ...tensors import CAST
from ...torch_internals import run_when_traced
from ..bits import FP32, FP64, Binary, to_float32
from ..layouts import Layout
from ..plans import Coding, plan_of
from ..unpatched import ADD, DIV, EQ, LEFT, MUL, NE, RIGHT
from .fixed import Fixed, FixedPlan
from .floats import Float
from .number_format import MeasuredFormat, check_codes, code_dtype
from .scaled_plans import E4M3, Element, ScaledPlan
from .tables import Table

Rule: TypeAlias = Literal["floor", "rceil", "ceil", "even"]

#: The rules for the shared exponent, with the names of torchao's ScaleCalculationMode.
RULES: Final[tuple[Rule, ...]] = ("floor", "rceil", "ceil", "even")


class SharedScales(MeasuredFormat):
    """A format whose elements share scales; its codes are those of elements and scales."""

    if TYPE_CHECKING:

        @property
        def element(self) -> Float | Fixed | Table:
            """The format of the elements, divided by their scale."""

        @property
        def layout(self) -> Layout:
            """The values that share scales."""

        @property
        def parts(self) -> str:
            """The parts that `decode` takes, for messages."""

    @property
    def code_bits(self) -> int:
        """Bits of an element's code."""
        return self.element.bits

    def scales_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the scales of values of a shape."""
        raise NotImplementedError

    def check_shape(self, scales: Tensor, shape: Sequence[int]) -> Tensor:
        """Returns scales; raises `OptionError` if values of a shape have scales of another shape."""
        return check_shape(scales, self.scales_shape(shape), self.name)

    def element_plan(self, binary: Binary, mode: str) -> Element:
        """Returns the plan for values divided by their scale."""
        element = self.element
        if isinstance(element, Table):  # its values are float32 numbers
            element = replace(element, values=tuple(map(to_float32, element.values)))
        plan = element.plan_in(binary, mode, "saturate")
        return replace(plan, least=-plan.most) if isinstance(plan, FixedPlan) else plan

    def exact_plan(self, dtype: torch.dtype) -> ScaledPlan:
        """Returns the plan for rounding to nearest."""
        if torch.compiler.is_dynamo_compiling():
            return plan_of(*_constants_of(self, dtype))  # type: ignore[return-value]
        if ("exact", dtype) not in self.derived:
            self.derived["exact", dtype] = self.plan(dtype, "nearest", None)
        return self.derived["exact", dtype]  # type: ignore[no-any-return]

    # --- codes ---------------------------------------------------------------------------------

    def coding(self, binary: Binary) -> Coding | None:
        """Returns the coding of values of a binary type, for kernels."""
        if binary is not FP32:
            return None
        # `encoded` finds elements by their float32 products with scales, which must differ.
        element = self.element
        if isinstance(element, Float):
            coding = element.coding(FP32, keeps_sign_of_nan=False)
            differ = element.smallest_subnormal >= 2.0**-20 and element.significand_bits <= 20
        else:
            coding = element.coding(FP32)
            differ = element.epsilon >= 2.0**-20 * max(element.max, -element.min, 1.0)
        can_decode = coding.can_decode and element.bits <= (4 if isinstance(element, Table) else 8)
        return Coding("scaled", coding.spec, differ, can_decode, coding.memory)

    def encoded(self, values: Tensor, rounded: Tensor, binary: Binary) -> tuple[Tensor, ...]:
        """Returns the codes of elements and scales, and the tensor's scale if it has one."""
        plan, layout, shape = self.exact_plan(binary.dtype), self.layout, values.shape
        rows, scales_shape = layout.to_rows(rounded), self.scales_shape(shape)
        tensor_scale = None
        if plan.has_tensor_scale:
            amax = plan.amax(values.reshape(-1) if values.numel() else values.new_zeros(1))
            tensor_scale = plan.scale(amax).reshape(())
        if values.numel():
            block_scale = plan.block_scale(plan.split(layout.to_rows(values)), tensor_scale)
        else:
            nothing = torch.zeros(scales_shape, dtype=torch.float32, device=values.device)
            block_scale = plan.scale(_by_block(nothing, layout))
        scale = block_scale if tensor_scale is None else MUL(tensor_scale, block_scale)
        # The product was rounded to float32, so the quotient is only near an element.
        exact = DIV(CAST[torch.float64](plan.split(rows)), CAST[torch.float64](scale))
        elements = self.element_plan(FP64, "nearest").round(exact, None)
        elements = elements.masked_fill_(NE(elements, elements), math.nan)  # of one sign
        codes = plan.join(self.element.codes_of(elements, FP64), rows)
        codes = layout.from_rows(codes, shape).to(code_dtype(self.element.bits)).contiguous()
        scales = layout.from_rows(block_scale.squeeze(-1), scales_shape).contiguous()
        if plan.scale_format == "e4m3":
            scales = E4M3.codes_of(scales, FP32).to(torch.uint8)
        elif plan.scale_format != "float32":
            scales = RIGHT(CAST[torch.float32](scales).view(torch.int32), 23).to(torch.uint8)
        return (codes, scales) if tensor_scale is None else (codes, scales, tensor_scale)

    def decoded(self, codes: Any) -> Tensor:
        """Returns the values of a result of `encoded`, in float32; else raises `OptionError`."""
        layout, plan = self.layout, self.exact_plan(torch.float32)
        if not isinstance(codes, tuple | list) or len(codes) != 2 + plan.has_tensor_scale:
            raise OptionError(f"format {self.name}: decode takes {self.parts}")
        check_codes(codes[0], self.name)
        elements = CAST[torch.float32](self.element.decoded(codes[0]))
        shape = elements.shape
        scales = _by_block(self._read_scales(codes[1], shape, plan.scale_format), layout)
        if plan.has_tensor_scale:
            scales = MUL(check_scales(codes[2], (), self.name), scales)
        if not elements.numel():
            return elements
        rows = layout.to_rows(elements)
        values = MUL(CAST[torch.float64](plan.split(rows)), CAST[torch.float64](scales))
        return layout.from_rows(plan.join(CAST[torch.float32](values), rows), shape).contiguous()

    def _read_scales(self, codes: Any, shape: Sequence[int], scale_format: str) -> Tensor:
        if scale_format == "float32":
            return check_scales(codes, self.scales_shape(shape), self.name)
        check_codes(codes, self.name)
        codes = self.check_shape(codes, shape)
        if scale_format == "e4m3":
            return E4M3.decoded(codes)
        if scale_format == "mx":  # 2**-127 is subnormal in float32
            power = LEFT(ADD(codes.to(torch.int64), FP64.bias - 127), FP64.mantissa)
            powers = power.view(torch.float64)
        else:
            powers = LEFT(codes.to(torch.int32), 23).view(torch.float32)
        return powers.masked_fill(EQ(codes, 255), math.nan)


def _by_block(scales: Tensor, layout: Layout) -> Tensor:
    """Returns scales in a shape for products with blocks."""
    rows = layout.to_rows(scales)
    return rows if layout.kind == "whole" else rows.unsqueeze(-1)


@run_when_traced
def _constants_of(format: SharedScales, dtype: torch.dtype) -> tuple[Any, ...]:
    """Returns the plan that dynamo traces as constants."""
    plan = format.plan(dtype, "nearest", None)
    assert plan is not None
    return plan.constants()


def check_scales(scales: object, shape: tuple[int, ...], name: str) -> Tensor:
    """Returns scales in float32; raises `OptionError` if they are not a floating tensor of that shape."""
    if not isinstance(scales, Tensor) or not scales.is_floating_point():
        what = scales.dtype if isinstance(scales, Tensor) else type(scales).__name__
        raise OptionError(f"format {name}: scales must be a floating tensor, not {what}")
    return CAST[torch.float32](check_shape(scales, shape, name))


def check_shape(scales: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    """Returns scales; raises `OptionError` if they have another shape."""
    if tuple(scales.shape) != shape:
        raise OptionError(
            f"format {name}: scales must be of shape {shape}, not {tuple(scales.shape)}"
        )
    return scales


def exponent_of(largest: float) -> int:
    """Returns the exponent of a positive number."""
    return math.frexp(largest)[1] - 1


def carry(rule: str, largest: float, significand_bits: int, mantissa: int) -> int:
    """Returns the number to add to the bits of the largest magnitude before its exponent is read.

    ``largest`` and ``significand_bits`` are the element's; ``mantissa`` is the compute type's.
    """
    ones = (1 << mantissa) - 1
    if rule == "ceil":
        return ones
    if rule == "rceil":  # one more if the mantissa is above the largest number's
        return ones - int((math.frexp(largest)[0] * 2 - 1) * (1 << mantissa))
    return 1 << (mantissa - significand_bits) if rule == "even" else 0
