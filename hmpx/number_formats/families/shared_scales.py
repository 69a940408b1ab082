"""Formats whose elements share scales: their codes, the rules for powers of two, and blocks as in MX."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import torch
from torch import Tensor

from ... import arguments
from ...arguments import is_a
from ...errors import OptionError, shown
from ...tensors import CAST
from ...torch_internals import run_when_traced
from ..bits import FP32, FP64, Binary, to_float32
from ..plans import Coding, Layout, plan_of
from ..unpatched import ADD, DIV, EQ, LEFT, MUL, NE, RIGHT
from ..vocabulary import Overflow
from .fixed import Fixed, FixedPlan
from .floats import Float
from .number_format import Figures, MeasuredFormat, check_codes, check_int, check_name, code_dtype
from .scaled_plans import E4M3, BlockPlan, Element, ScaledPlan
from .tables import Table

Rule: TypeAlias = Literal["floor", "rceil", "ceil", "even"]

#: The rules for the shared exponent, with the names of torchao's ScaleCalculationMode.
RULES: Final[tuple[Rule, ...]] = ("floor", "rceil", "ceil", "even")

#: Elements of the largest block in float64 that the kernel encodes, STRIP_ELEMENTS in ``code_kernels.h``.
_MOST_ENCODED: Final = 2048


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
        """Returns the shape of the scales of values of a shape, without the tensor's."""
        return self.layout.scales_shape(shape)

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
            return plan_of(*_constants_of(self, dtype))  # type: ignore[no-any-return]
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
            block_scale = plan.block_scale(layout.split(layout.to_rows(values)), tensor_scale)
        else:
            nothing = torch.zeros(scales_shape, dtype=torch.float32, device=values.device)
            block_scale = plan.scale(layout.to_rows(nothing).unsqueeze(-1))
        scale = block_scale if tensor_scale is None else MUL(tensor_scale, block_scale)
        # The product was rounded to float32, so the quotient is only near an element.
        exact = DIV(CAST[torch.float64](layout.split(rows)), CAST[torch.float64](scale))
        elements = self.element_plan(FP64, "nearest").round(exact, None)
        elements = elements.masked_fill_(NE(elements, elements), math.nan)  # of one sign
        codes = layout.join(self.element.codes_of(elements, FP64), rows)
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
        scales = layout.to_rows(self._read_scales(codes[1], shape, plan.scale_format)).unsqueeze(-1)
        if plan.has_tensor_scale:
            scales = MUL(check_scales(codes[2], (), self.name), scales)
        if not elements.numel():
            return elements
        rows = layout.to_rows(elements)
        values = MUL(CAST[torch.float64](layout.split(rows)), CAST[torch.float64](scales))
        return layout.from_rows(layout.join(CAST[torch.float32](values), rows), shape).contiguous()

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


@dataclass(frozen=True)
class Block(SharedScales):
    """Blocks of elements that share a power of two, as in the OCP Microscaling (MX) specification.

    The shared exponent derives from the block's largest magnitude (amax), is from -127 to 127 (in fixed point
    from -126), and is stored in 8 bits (E8M0). No element times its scale is infinite.

    Attributes:
        name: An identifier.
        element: The format of the elements, divided by their block's scale: a `Float`, or a `Fixed` one
            as in MXINT8, without its least number, so that it is symmetric.
        size: Elements of a block; the last block of a row may be shorter.
        axis: The axis along which elements form blocks.
        rule: How to choose the shared exponent, by torchao's names (ScaleCalculationMode). ``"floor"``: that
            of amax minus that of the largest element, as in the OCP specification; amax may saturate.
            ``"rceil"``: the least without saturation, as on Blackwell. ``"ceil"``: like ``"floor"``, for amax
            rounded up to a power of two. ``"even"``: like ``"floor"``, for amax rounded to the element's
            mantissa bits.

    Example:
        >>> element = hmpx.formats.Float("e2m1", exponent_bits=2, mantissa_bits=1, kind="finite")
        >>> pairs = hmpx.formats.Block("pairs", element, size=2)
        >>> hmpx.formats.quantize(torch.tensor([1.1, 6.0, 100.0, 600.0]), pairs)
        tensor([  1.,   6., 128., 512.])
    """

    element: Float | Fixed
    size: int = 32
    axis: int = -1
    rule: Rule = "floor"

    parts = "the pair (codes, scales)"

    def __post_init__(self) -> None:
        """Checks the fields; raises `OptionError`."""
        check_name(self.name)
        what, element = f"format {self.name}", self.element
        if not is_a(element, (Float, Fixed)):
            raise OptionError(
                f"{what}: element must be a Float or Fixed, not {shown(element)}; "
                "get(name) returns a registered one"
            )
        # Then elements are exact in float32, also divided or multiplied by their scale.
        least = 1 if is_a(element, Float) else -1
        if not (least <= exponent_of(element.max) <= 16 and element.smallest_subnormal >= 2.0**-22):
            raise OptionError(
                f"{what}: element {element.name} must have a largest exponent from {least} to 16 "
                "and no numbers below 2**-22"
            )
        object.__setattr__(self, "rule", arguments.choice(f"{what}: rule", self.rule, RULES))
        check_int(self.name, "size", self.size, 1, 65536)
        check_int(self.name, "axis", self.axis, -64, 63)

    @property
    def bits(self) -> float:
        """Bits per value, including the shared scale's; codes of elements are whole bytes."""
        return self.element.bits + 8 / self.size

    @property
    def _figures(self) -> Figures:
        element = self.element._figures
        lowest = -126 if isinstance(self.element, Fixed) else -127
        return element._replace(
            max=math.ldexp(element.max, 127 - exponent_of(element.max)),
            smallest_normal=math.ldexp(element.smallest_normal, lowest),
            smallest_subnormal=math.ldexp(element.smallest_subnormal, lowest),
        )

    @property
    def layout(self) -> Layout:
        """The layout of blocks along the axis."""
        return Layout("rows", self.axis, self.size)

    def plan_in(self, binary: Binary, mode: str, overflow: Overflow) -> BlockPlan:
        """Returns the plan for tensors of a binary type that has room for the format."""
        largest = self.element.max
        exponent = exponent_of(largest)
        return BlockPlan(
            *(binary, mode, self.element_plan(binary, mode), self.layout, "mx", False, 1.0),
            *(2.0**-126, math.ldexp(1.0, 127 - exponent), exponent),
            carry(self.rule, largest, self.significand_bits, binary.mantissa),
        )

    def scales_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the scales of values of a shape."""
        return self.layout.scales_shape(shape or (1,))

    def check_shape(self, scales: Tensor, shape: Sequence[int]) -> Tensor:
        """Returns scales; raises `OptionError` if values of a shape have scales of another shape."""
        if not shape and scales.numel() == 1:
            return scales.view(1)
        expected = self.scales_shape(shape)
        if tuple(scales.shape) != expected:
            raise OptionError(
                f"format {self.name}: codes of shape {tuple(shape)} have scales of shape "
                f"{expected}, not {tuple(scales.shape)}"
            )
        return scales

    def coding(self, binary: Binary) -> Coding | None:
        """Returns the coding of values of a binary type, for kernels."""
        if binary is FP32 or not isinstance(self.element, Float):
            return super().coding(binary)
        element = self.element.coding(binary, keeps_sign_of_nan=False)
        return Coding("block", element.spec, can_encode=self.size <= _MOST_ENCODED)
