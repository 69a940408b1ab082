"""Elements that share scales derived from their largest magnitude: any scales, or powers of two as in MX."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeAlias

import torch
from torch import Tensor

from ... import arguments
from ...errors import OptionError, shown
from ...tensors import CAST, SPARSE
from ...torch_internals import run_when_traced
from ..bits import FP32, FP64, Binary, to_float32
from ..plans import NO_GRID, Coding, Grid, Kind, Layout, Plan, plan_of, struct
from ..unpatched import (
    ADD,
    AMAX,
    AND,
    CLAMP,
    DIV,
    EMPTY_LIKE,
    EQ,
    FILL,
    GE,
    LEFT,
    LT,
    MUL,
    NE,
    OR,
    RECIPROCAL,
    RIGHT,
    WHERE,
)
from ..vocabulary import MOST_STEPS, Overflow
from .fixed import Fixed, FixedPlan, FixedSpec
from .floats import BitsPlan, Float, FloatPlan
from .number_format import (
    FLOAT32_MOST,
    Figures,
    MeasuredFormat,
    check_codes,
    check_int,
    check_name,
    code_dtype,
    hint,
    listed,
)
from .tables import Table, TablePlan

#: The plans of elements.
Element: TypeAlias = FloatPlan | BitsPlan | FixedPlan | TablePlan

#: Scales in e4m3.
E4M3_LEAST: Final = 2.0**-6
E4M3_MOST: Final = 448.0
E4M3: Final = Float("e4m3", 4, 3, kind="fn")
_E4M3_PLAN: Final = E4M3.plan_in(FP32, "nearest", "saturate")

#: In the kernel's order; "mx" is e8m0 in blocks, with ``2**-127``.
_SCALE_FORMATS: Final = ("float32", "e8m0", "e4m3", "mx")

#: Values of the largest table that the kernel supports.
_SMALL_TABLE: Final = 16


#: The kernel's ``scaled_spec``.
_ScaledSpec: Final = struct(
    ("element e4m3", ctypes.c_int64 * 8),
    ("fixed", FixedSpec),
    ("kind scale_format has_tensor_scale max_exponent carry nan_index", ctypes.c_int64),
    ("rows mid columns height width is_whole", ctypes.c_int64),
    ("places", ctypes.c_int64 * 4),
    ("is_given", ctypes.c_int64),
    ("largest tensor_largest least_scale most_scale given", ctypes.c_float),
    ("values thresholds", ctypes.c_float * _SMALL_TABLE),
)


@dataclass(frozen=True)
class ScaledPlan(Plan):
    """Rounds elements that share scales."""

    element: Element  # rounds elements divided by their scale
    blocks: Layout  # values that share a scale
    scale_format: str  # or "mx" in a BlockPlan
    has_tensor_scale: bool  # scales are divided by one of the whole tensor
    largest: float  # the largest magnitude of an element
    least_scale: float  # of the tensor if it has one, else of blocks
    most_scale: float
    max_exponent: int  # of `largest`
    carry: int  # added to the bits of a magnitude before its exponent is read

    kernel = "scaled"
    kernel_binaries: ClassVar[tuple[Binary, ...]] = (FP32,)

    @property
    def layout(self) -> Layout:
        return self.blocks

    def round(self, x: Tensor, noise: Tensor | None) -> Tensor:
        return self.round_by(x, noise, None)

    def round_by(self, x: Tensor, noise: Tensor | None, scale: Tensor | None) -> Tensor:
        if x.numel() == 0:
            return x.clone()
        blocks, tensor_scale = self.blocks.split(x), None
        if scale is not None:
            scale = CLAMP(scale, self.least_scale, self.most_scale)
        if self.has_tensor_scale:
            tensor_scale = self.scale(self.amax(x.reshape(-1))) if scale is None else scale
        if scale is None or self.has_tensor_scale:
            block_scale = self.block_scale(blocks, tensor_scale)
        else:
            block_scale = scale.reshape(*blocks.shape[:-1], 1)
        scale = divisor = block_scale
        by: Callable[..., Tensor] = DIV
        if self.scale_format == "e4m3":
            by, divisor = MUL, RECIPROCAL(block_scale)
            if tensor_scale is not None:
                scale = MUL(tensor_scale, block_scale)
                divisor = DIV(RECIPROCAL(tensor_scale), block_scale)
        elements = self.elements(blocks, by(blocks, CAST[self.binary.dtype](divisor)), noise)
        # Values are float32 numbers in any compute type.
        values = MUL(CAST[torch.float32](elements), scale)
        return CAST[self.binary.dtype](self.blocks.join(values, x))

    @property
    def has_one_scale(self) -> bool:
        return self.has_tensor_scale or self.blocks.kind == "whole"

    def amax(self, blocks: Tensor) -> Tensor:
        """Returns the largest magnitudes in the last dimension, with keepdim, as float32.

        NaN for rows with infinity or NaN; at most float32's largest number.
        """
        binary = self.binary
        most = AMAX(AND(blocks.view(binary.integer), binary.magnitude), -1, True)
        found = CLAMP(CAST[torch.float32](most.view(binary.dtype)), max=FLOAT32_MOST)
        return found.masked_fill_(GE(most, binary.infinity), math.nan)

    def scale(self, amax: Tensor) -> Tensor:
        """Returns the scales for largest magnitudes, of the tensor if it has one; NaN for infinity."""
        amax = FILL(amax, EQ(amax, math.inf), math.nan)
        if self.scale_format == "e8m0":
            exponent = RIGHT(ADD(amax.view(torch.int32), self.carry), 23).sub_(self.max_exponent)
            power = LEFT(CLAMP(exponent, 1, 254), 23).view(torch.float32)
            scale = power.masked_fill_(NE(amax, amax), math.nan)
        else:
            divisor = self.largest * (E4M3_MOST if self.has_tensor_scale else 1.0)
            scale = _divided(amax, divisor)
        scale = CLAMP(scale, self.least_scale, self.most_scale)
        is_coarse = self.scale_format == "e4m3" and not self.has_tensor_scale
        return _E4M3_PLAN.round(scale, None) if is_coarse else scale

    def block_scale(self, blocks: Tensor, tensor_scale: Tensor | None) -> Tensor:
        """Returns the scales of blocks: [..., 1], without the tensor's."""
        amax = self.amax(blocks)
        if tensor_scale is None:
            return self.scale(amax)
        scale = DIV(_divided(amax, self.largest), tensor_scale)
        return _E4M3_PLAN.round(CLAMP(scale, E4M3_LEAST, E4M3_MOST), None)

    def elements(self, blocks: Tensor, scaled: Tensor, noise: Tensor | None) -> Tensor:
        """Returns the elements: ``blocks``, divided by their scale to ``scaled``, and rounded."""
        if self.mode in ("up", "down"):
            # Restores nonzero values that the division has flushed to zero.
            binary = self.binary
            bits, least = blocks.view(binary.integer), (binary.bias - 126) << binary.mantissa
            is_lost = LT(AND(scaled.view(binary.integer), binary.magnitude), least)
            is_lost = AND(is_lost, NE(AND(bits, binary.magnitude), 0))
            tiny = OR(AND(bits, binary.sign), least).view(binary.dtype)
            scaled = WHERE(is_lost, tiny, scaled)
        return self.element.round(scaled, None if noise is None else self.blocks.split(noise))

    # --- kernels -------------------------------------------------------------------------------

    @property
    def has_kernel(self) -> bool:
        is_small = isinstance(self.element, TablePlan) and len(self.element.values) <= _SMALL_TABLE
        is_known = isinstance(self.element, FloatPlan | FixedPlan)
        return super().has_kernel and (is_known or (is_small and self.mode == "nearest"))

    def kernel_spec(self, grid: Grid = NO_GRID) -> Any:
        element, spec = self.element, _ScaledSpec()
        spec.element[0] = self.mode_number
        if isinstance(element, FloatPlan):
            spec.kind, spec.element[:] = 0, element.kernel_numbers()
        elif isinstance(element, FixedPlan):
            spec.kind, spec.fixed = 1, element.kernel_spec()
        else:
            assert isinstance(element, TablePlan)
            spec.kind, spec.nan_index, count = 2, element.zero_index, len(element.values)
            for j in range(_SMALL_TABLE):
                spec.values[j] = element.values[min(j, count - 1)]
                spec.thresholds[j] = element.thresholds[j] if j < count - 1 else math.inf
        assert isinstance(_E4M3_PLAN, FloatPlan)
        spec.e4m3[:] = _E4M3_PLAN.kernel_numbers()
        spec.scale_format = _SCALE_FORMATS.index(self.scale_format)
        spec.has_tensor_scale = self.has_tensor_scale
        spec.max_exponent, spec.carry = self.max_exponent, self.carry
        spec.is_whole, spec.largest = self.blocks.kind == "whole", self.largest
        spec.rows, spec.mid, spec.columns = grid[:3]
        spec.height, spec.width = self.blocks.tile(grid)
        spec.places[:] = self.blocks.places(grid)
        spec.tensor_largest = self.largest * E4M3_MOST
        spec.least_scale, spec.most_scale = self.least_scale, self.most_scale
        return spec


@dataclass(frozen=True)
class BlockPlan(ScaledPlan):
    """Rounds elements that share powers of two; exponents are computed in the compute type."""

    kernel = "block"
    kernel_binaries = (FP32, FP64)

    def round(self, x: Tensor, noise: Tensor | None) -> Tensor:
        if x.numel() == 0:
            return x.clone()
        blocks = self.blocks.split(x)
        exponent, is_bad = self._exponents(blocks)
        if isinstance(self.element, FixedPlan):  # 2**-127 may be flushed, so it can't be a divisor
            scaled = DIV(blocks, self._power(exponent))
        else:
            scaled = MUL(blocks, self._power(exponent.neg()))
        scale = self._power(exponent).masked_fill_(is_bad, math.nan)
        return self.blocks.join(MUL(self.elements(blocks, scaled, noise), scale), x)

    def block_scale(self, blocks: Tensor, tensor_scale: Tensor | None) -> Tensor:
        exponent, is_bad = self._exponents(blocks)
        return self._power(exponent).masked_fill_(is_bad, math.nan)

    def _exponents(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the shared exponents, and whether a block contains infinity or NaN: [..., n, 1]."""
        binary = self.binary
        most = AMAX(AND(blocks.view(binary.integer), binary.magnitude), -1, True)
        carried = ADD(most, self.carry) if self.carry else most
        exponent = RIGHT(carried, binary.mantissa).sub_(binary.bias + self.max_exponent)
        lowest = -126 if isinstance(self.element, FixedPlan) else -127
        return CLAMP(exponent, lowest, 127 - self.max_exponent), GE(most, binary.infinity)

    def _power(self, exponent: Tensor) -> Tensor:
        binary = self.binary
        bits = LEFT(ADD(exponent, binary.bias), binary.mantissa)
        if binary.mantissa == 23:
            bits = bits.masked_fill_(EQ(bits, 0), 1 << 22)  # 2**-127 is subnormal
        return bits.view(binary.dtype)

    @property
    def has_kernel(self) -> bool:
        return isinstance(self.element, FloatPlan) or self.binary is FP32

    @property
    def symbol(self) -> str:
        return "scaled_f32" if self.binary is FP32 else super().symbol

    def kernel_spec(self, grid: Grid = NO_GRID) -> Any:
        if self.binary is FP32:
            spec = super().kernel_spec(grid)
            if isinstance(self.element, FixedPlan):
                spec.scale_format = _SCALE_FORMATS.index("e8m0")
            return spec
        assert isinstance(self.element, FloatPlan)
        extent = (grid.rows, grid.columns) if grid.is_across else (grid.columns, 1)
        numbers = (self.max_exponent, self.carry, self.blocks.size, *extent)
        return (ctypes.c_int64 * 13)(*self.element.kernel_numbers(), *numbers)


def _divided(amax: Tensor, number: float) -> Tensor:
    """Returns magnitudes divided by a number, as a tensor: some devices multiply by the inverse of numbers."""
    return DIV(amax, EMPTY_LIKE(amax).fill_(number))


# --- formats -------------------------------------------------------------------------------------

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

    def scales_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the scales of values of a shape, without the tensor's."""
        return self.layout.scales_shape(shape)

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
        plan, layout, tensor_scale = self.exact_plan(binary.dtype), self.layout, None
        scales_shape = self.scales_shape(values.shape)
        if plan.has_tensor_scale:
            amax = plan.amax(values.reshape(-1) if values.numel() else values.new_zeros(1))
            tensor_scale = plan.scale(amax).reshape(())
        if values.numel():
            blocks, of_rounded = layout.split(values), layout.split(rounded)
            block_scale = plan.block_scale(blocks, tensor_scale)
            scale = block_scale if tensor_scale is None else MUL(tensor_scale, block_scale)
            # The product was rounded to float32, so the quotient is only near an element.
            exact = DIV(CAST[torch.float64](of_rounded), CAST[torch.float64](scale))
            elements = self.element_plan(FP64, "nearest").round(exact, None)
            elements = elements.masked_fill_(NE(elements, elements), math.nan)  # of one sign
            codes = layout.join(self.element.codes_of(elements, FP64), values)
        else:
            codes = values
            block_scale = plan.scale(
                torch.zeros(scales_shape, dtype=torch.float32, device=values.device)
            )
        codes = codes.to(code_dtype(self.element.bits)).contiguous()
        scales = block_scale.reshape(scales_shape).contiguous()
        if plan.scale_format == "e4m3":
            scales = E4M3.codes_of(scales, FP32).to(torch.uint8)
        elif plan.scale_format != "float32":
            scales = RIGHT(CAST[torch.float32](scales).view(torch.int32), 23).to(torch.uint8)
        return (codes, scales) if tensor_scale is None else (codes, scales, tensor_scale)

    def decoded(self, codes: Any) -> Tensor:
        layout, plan = self.layout, self.exact_plan(torch.float32)
        if not isinstance(codes, tuple | list) or len(codes) != 2 + plan.has_tensor_scale:
            parts = "codes, scales" + ", the tensor's scale" * plan.has_tensor_scale
            raise OptionError(f"format {self.name}: decode takes ({parts})")
        check_codes(codes[0], self.name)
        elements = CAST[torch.float32](self.element.decoded(codes[0]))
        scales = self._read_scales(codes[1], elements.shape, plan.scale_format)
        if plan.has_tensor_scale:
            scales = MUL(check_scales(codes[2], (), self.name), scales)
        if not elements.numel():
            return elements
        blocks = CAST[torch.float64](layout.split(elements))
        scales = CAST[torch.float64](scales).reshape(*blocks.shape[:-1], 1)
        return layout.join(CAST[torch.float32](MUL(blocks, scales)), elements).contiguous()

    def _read_scales(self, codes: Any, shape: Sequence[int], scale_format: str) -> Tensor:
        if scale_format == "float32":
            return check_scales(codes, self.scales_shape(shape), self.name)
        check_codes(codes, self.name)
        codes = check_shape(codes, self.scales_shape(shape), self.name)
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

    def __post_init__(self) -> None:
        check_name(self.name)
        what, element = f"format {self.name}", self.element
        if not isinstance(element, (Float, Fixed)):
            raise OptionError(
                f"{what}: element must be a Float or Fixed, not {shown(element)}; "
                "get(name) returns a registered one"
            )
        # Then elements are exact in float32, also divided or multiplied by their scale.
        least = 1 if isinstance(element, Float) else -1
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
        return Layout("rows", self.axis, self.size)

    def plan_in(self, binary: Binary, mode: str, overflow: Overflow) -> BlockPlan:
        largest = self.element.max
        exponent = exponent_of(largest)
        return BlockPlan(
            *(binary, mode, self.element_plan(binary, mode), self.layout, "mx", False, 1.0),
            *(2.0**-126, math.ldexp(1.0, 127 - exponent), exponent),
            carry(self.rule, largest, self.significand_bits, binary.mantissa),
        )

    def scales_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return self.layout.scales_shape(shape or (1,))

    def coding(self, binary: Binary) -> Coding | None:
        if binary is FP32 or not isinstance(self.element, Float):
            return super().coding(binary)
        element = self.element.coding(binary, keeps_sign_of_nan=False)
        return Coding("block", element.spec, can_encode=self.size <= _MOST_ENCODED)


Granularity: TypeAlias = "Literal['tensor', 'row', 'column'] | int | tuple[int, int]"
AmaxRule: TypeAlias = Literal["max", "most_recent"]
ScaleFormat: TypeAlias = Literal["float32", "e8m0", "e4m3"]

#: The amax of a history that determines the scale; the default first.
_AMAX_RULES: Final[tuple[AmaxRule, ...]] = ("max", "most_recent")

#: The largest margin.
_MOST_MARGIN: Final = 64

#: Granularity -> the layout of values that share a scale.
_LAYOUTS: Final[dict[str, Kind]] = {"tensor": "whole", "row": "rows", "column": "columns"}
_MOST_SIZE: Final = 65536

#: Scale format -> bits of a scale.
_SCALE_BITS: Final = {"float32": 32, "e8m0": 8, "e4m3": 8}


@dataclass(frozen=True)
class Scaled(SharedScales):
    """Elements that share scales: a value is an element times its scale, rounded to float32.

    A scale is the largest magnitude of the values that share it (amax), divided by the element's
    largest, so that amax becomes the largest element, as in DeepSeek-V3's kernels and torchao's
    ``_choose_scale_float8`` and ``nvfp4_quantize``. Values are divided by their scale in their own
    precision, rounded to elements, saturated beyond the largest, and multiplied by the scale.

    - All values that share their scale with infinity or NaN become NaN.
    - Zeros stay zeros: a scale is at least ``2**-126``, that of a tensor with e4m3 scales at least
      ``2**-121``, and an e4m3 scale at least ``2**-6``, so that its reciprocal exists. Values far below
      that become zero.
    - float64 beyond float32's largest number saturates.

    Attributes:
        name: An identifier.
        element: The format of the elements: a `Float`, a `Fixed` one without its least number, so that it
            is symmetric, or a `Table`.
        granularity: The values that share a scale. ``"tensor"``: all values. ``"row"``: those of a vector
            along the axis. ``"column"``: those with the same index on the axis. ``n``: n neighbours along
            the axis; the last group may be smaller. ``(m, n)``: n neighbours along the axis and m along the
            last axis, or along the second last if the axis is the last.
        scale_format: ``"float32"``; ``"e8m0"``: powers of two from ``2**-126`` to ``2**127``; or
            ``"e4m3"``: numbers from ``2**-6`` to 448.
        rule: How to choose powers of two, as in `Block`; None: ``"rceil"``, the smallest without
            saturation, as in TransformerEngine's float32 scales. For ``"e8m0"`` only.
        tensor_scale: Scales in e4m3 are divided by one of the whole tensor in float32: its amax divided by
            the largest element and by 448, as in NVFP4. For ``"e4m3"`` only.
        axis: The axis; ignored for ``"tensor"``.
        history: How many ended training steps determine the scales of a conversion's ops (delayed
            scaling); None: the tensor's own amax does, as always in `quantize`. For ``"tensor"`` only.
        amax_rule: The amax to use: ``"max"``, the largest of the history; or ``"most_recent"``. None:
            ``"max"``. With a history only.
        margin: The amax is multiplied by ``2**margin``. With a history only.

    Example:
        >>> int4 = hmpx.formats.Fixed("int4", integer_bits=4, fraction_bits=0)
        >>> rows = hmpx.formats.Scaled("int4_rows", int4, "row")
        >>> hmpx.formats.quantize(torch.tensor([[0.5, 6.8, -7.0], [0.1, 0.2, 0.7]]), rows)
        tensor([[ 0.0000,  7.0000, -7.0000],
                [ 0.1000,  0.2000,  0.7000]])
    """

    element: Float | Fixed | Table
    granularity: Granularity = "tensor"
    scale_format: ScaleFormat = "float32"
    rule: Rule | None = None
    tensor_scale: bool = False
    axis: int = -1
    history: int | None = None
    amax_rule: AmaxRule | None = None
    margin: int = 0

    def __post_init__(self) -> None:
        check_name(self.name)
        what = f"format {self.name}"
        if not isinstance(self.element, (Float, Fixed, Table)):
            raise OptionError(
                f"{what}: element must be a Float, Fixed or Table, not {shown(self.element)}; "
                "get(name) returns a registered one"
            )
        fits = self.element.fits_in_float32 and (
            isinstance(self.element, Table) or self.element.is_exact_in_float32
        )
        if not fits:
            raise OptionError(f"{what}: element {self.element.name} does not fit in float32")
        object.__setattr__(self, "granularity", _checked_granularity(what, self.granularity))
        scale_format = arguments.choice(f"{what}: scale_format", self.scale_format, _SCALE_BITS)
        object.__setattr__(self, "scale_format", scale_format)
        arguments.truth(f"{what}: tensor_scale", self.tensor_scale)
        if self.tensor_scale and scale_format != "e4m3":
            raise OptionError(f"{what}: tensor_scale is for scales in e4m3, not {scale_format}")
        if self.rule is not None:
            object.__setattr__(self, "rule", arguments.choice(f"{what}: rule", self.rule, RULES))
            if scale_format != "e8m0":
                raise OptionError(f"{what}: rule is for scales in e8m0, not {scale_format}")
            if self.rule == "even" and isinstance(self.element, Table):
                raise OptionError(f"{what}: rule 'even' is for floats and fixed point, not tables")
        check_int(self.name, "axis", self.axis, -64, 63)
        object.__setattr__(self, "amax_rule", self._checked_history(what))

    def _checked_history(self, what: str) -> AmaxRule | None:
        """Returns the checked rule for the amax of a history; None without a history."""
        rule: AmaxRule | None = None
        if self.amax_rule is not None:
            rule = arguments.choice(f"{what}: amax_rule", self.amax_rule, _AMAX_RULES)
        check_int(self.name, "margin", self.margin, 0, _MOST_MARGIN)
        if self.history is None:
            for field in ("amax_rule", "margin"):
                if getattr(self, field):
                    raise OptionError(f"{what}: {field} is for a history; add history=16, say")
            return None
        check_int(self.name, "history", self.history, 1, MOST_STEPS)
        if self.granularity != "tensor" or self.tensor_scale:
            have = f"granularity {self.granularity!r}"
            if self.tensor_scale:
                have = "a scale in addition to those of blocks"
            raise OptionError(
                f"{what}: history is for one scale a tensor, granularity 'tensor', not for {have}; "
                "leave history out, for scales by the tensor at hand"
            )
        return rule or "max"

    # --- figures -------------------------------------------------------------------------------

    @property
    def bits(self) -> float:
        """Bits per value, including blocks' scales; other scales are negligible."""
        layout, bits = self.layout, _SCALE_BITS[self.scale_format]
        return self.element.bits + (bits / (layout.height * layout.size) if layout.size else 0)

    @property
    def _figures(self) -> Figures:
        element = self.element._figures
        least, most = self.scale_limits
        if self.tensor_scale:
            least, most = least * E4M3_LEAST, most * E4M3_MOST
        return element._replace(
            max=to_float32(self.largest * most),
            smallest_normal=element.smallest_normal * least,
            smallest_subnormal=element.smallest_subnormal * least,
        )

    @property
    def largest(self) -> float:
        """The largest magnitude of an element."""
        if isinstance(self.element, Table):
            return max(abs(to_float32(value)) for value in self.element.values)
        return self.element.max

    @property
    def scale_limits(self) -> tuple[float, float]:
        """The least and the largest scale: of the tensor if it has one, or else of blocks."""
        most = Fraction(FLOAT32_MOST) / Fraction(self.largest)  # keeps values finite
        if self.scale_format == "e8m0":
            return 2.0**-126, math.ldexp(1.0, min(127 - exponent_of(self.largest), 127))
        if self.scale_format == "float32":
            return 2.0**-126, FP32.floor(min(most, Fraction(FLOAT32_MOST)))
        if self.tensor_scale:  # also the reciprocal of the product of both scales
            return 2.0**-121, FP32.before(FP32.floor(min(most / 448, Fraction(2) ** 117)))
        return E4M3_LEAST, E4M3_MOST

    # --- rounding ------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        if isinstance(self.granularity, tuple):
            height, width = self.granularity
            return Layout("tiles", self.axis, width, height)
        if isinstance(self.granularity, int):
            return Layout("rows", self.axis, self.granularity)
        return Layout(_LAYOUTS[self.granularity], self.axis)

    def plan_in(self, binary: Binary, mode: str, overflow: Overflow) -> ScaledPlan:
        largest = self.largest
        least, most = self.scale_limits
        return ScaledPlan(
            binary, mode, self.element_plan(binary, mode), self.layout, self.scale_format,
            self.tensor_scale, largest, least, most, exponent_of(largest),
            carry(self.rule or "rceil", largest, self.significand_bits, 23),
        )  # fmt: skip

    # --- scales --------------------------------------------------------------------------------

    def amax(self, x: Tensor) -> Tensor:
        """Returns the largest magnitudes of the values that share a scale, as in histories.

        Args:
            x: As for `quantize`.

        Returns:
            float32. 0-dim for ``"tensor"`` and with ``tensor_scale``; otherwise x's shape, with each axis
            reduced to its number of scales. NaN for values with infinity or NaN; 0 for empty tensors.

        Raises:
            OptionError: ``x`` lacks the axis, or is not a dense floating tensor.

        Example:
            >>> hmpx.formats.get("nvfp4").amax(torch.tensor([1.0, -3.0]))
            tensor(3.)
        """
        if not isinstance(x, Tensor):
            raise OptionError(f"amax takes a tensor, not {type(x).__name__}")
        if x.dtype not in CAST or x.layout in SPARSE:
            what = x.layout if x.layout in SPARSE else x.dtype
            raise OptionError(
                f"amax takes dense tensors of {', '.join(map(str, CAST))}, not of {what}"
            )
        layout = self._layout_of_scales
        with torch.no_grad():
            plan = self.exact_plan(x.dtype)
            shape = self.scale_shape(x.shape)
            if not x.numel():
                return torch.zeros(shape, dtype=torch.float32, device=x.device)
            blocks = layout.split(CAST[plan.binary.dtype](x.detach()))
            return plan.amax(blocks).reshape(shape)

    def scale(self, amax: Tensor) -> Tensor:
        """Returns the scales for largest magnitudes, in float32, for the ``scale`` of `quantize`.

        Args:
            amax: A float32 result of `amax`, or the largest of several.

        Raises:
            OptionError: ``amax`` is not float32.

        Example:
            >>> format = hmpx.formats.get("nvfp4")
            >>> format.scale(torch.tensor(2688.0))
            tensor(1.)
        """
        if not isinstance(amax, Tensor) or amax.dtype is not torch.float32:
            what = amax.dtype if isinstance(amax, Tensor) else type(amax).__name__
            raise OptionError(f"format {self.name}: amax must be a tensor of float32, not {what}")
        with torch.no_grad():
            return self.exact_plan(torch.float32).scale(amax.detach())

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the scales, or of the tensor's, for values of a shape."""
        return self._layout_of_scales.scales_shape(shape)

    def check_scale(self, scale: object, x: Tensor) -> None:
        check_scales(scale, self.scale_shape(x.shape), self.name)

    @property
    def _layout_of_scales(self) -> Layout:
        return Layout("whole") if self.tensor_scale else self.layout


def _checked_granularity(what: str, value: Any) -> Granularity:
    if isinstance(value, str) and value in _LAYOUTS:
        return str.__str__(value)  # type: ignore[return-value]  # one of these
    if isinstance(value, (tuple, list)):
        if len(value) == 2 and all(map(_is_size, value)):
            return tuple(value)
    elif _is_size(value):
        return value  # type: ignore[no-any-return]  # checked
    raise OptionError(
        f"{what}: granularity must be one of {listed(_LAYOUTS)}, a size from 1 to {_MOST_SIZE}, "
        f"or a pair of sizes, not {shown(value)}{hint(value, _LAYOUTS)}"
    )


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MOST_SIZE
