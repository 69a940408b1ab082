"""Blocks of elements that share a power of two."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from ... import arguments
from ...arguments import is_a
from ...errors import OptionError, shown
from ..bits import FP32, Binary
from ..codings import Coding
from ..layouts import NO_GRID, Grid, Layout
from ..modes import Overflow
from ..plans import Plan
from ..unpatched import (
    ADD,
    AMAX,
    AND,
    CLAMP,
    DIV,
    EQ,
    GE,
    LEFT,
    LT,
    MOVEDIM,
    MUL,
    NE,
    OR,
    PAD,
    RIGHT,
    WHERE,
)
from .block_codes import decoded
from .fixed import Fixed, FixedPlan
from .float_plans import FloatPlan
from .floats import Float
from .number_format import NumberFormat, check_int, check_name, code_dtype
from .scaled_codes import scaled_coding
from .scaled_plans import ScaledPlan
from .shared_exponents import RULES, Rule, carry, exponent_of

#: Elements of the largest block in float64 that the kernel encodes, STRIP_ELEMENTS in ``code_kernels.h``.
_MOST_ENCODED: Final = 2048


@dataclass(frozen=True)
class BlockPlan(Plan):
    """Blocks with a shared power of two.

    Attributes:
        binary: The type that it computes in.
        mode: The rounding mode.
        element: How the elements are rounded, divided by their scale.
        size: Elements of a block.
        max_exponent: The exponent of the largest element.
        carry: What is added to the bits of the largest magnitude before its exponent is taken.
    """

    binary: Binary
    mode: str
    element: FloatPlan | FixedPlan
    size: int
    max_exponent: int
    carry: int

    kernel = "block"
    is_by_row = True

    def round(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """Returns the values of ``x`` rounded; blocks lie along its last dimension."""
        # x: [..., k] -> blocks: [..., ceil(k / size), size]
        length = x.shape[-1]
        blocks = self.split(x)
        if noise is not None:
            noise = self.split(noise)
        exponent, is_bad = self.exponents(blocks)
        elements = self.scaled(blocks, exponent, noise)
        result = MUL(elements, self._power(exponent).masked_fill_(is_bad, math.nan))
        return result.reshape(*x.shape[:-1], -1)[..., :length]

    def split(self, x: Tensor) -> Tensor:
        """Returns ``x`` in blocks, the last one of each row padded with zeros."""
        length = x.shape[-1]
        if missing := -length % self.size:
            x = PAD(x, (0, missing))
        return x.reshape(*x.shape[:-1], (length + missing) // self.size, self.size)

    def exponents(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the shared exponents, and whether a block holds infinity or NaN: [..., n, 1]."""
        binary = self.binary
        most = AMAX(AND(blocks.view(binary.integer), binary.magnitude), -1, True)
        carried = ADD(most, self.carry) if self.carry else most
        exponent = RIGHT(carried, binary.mantissa).sub_(binary.bias + self.max_exponent)
        return CLAMP(exponent, self.lowest, 127 - self.max_exponent), GE(most, binary.infinity)

    def scaled(self, blocks: Tensor, exponent: Tensor, noise: Tensor | None) -> Tensor:
        """Returns the elements: ``blocks`` divided by their scale, rounded."""
        binary = self.binary
        if isinstance(self.element, FixedPlan):  # 2**-127, which may be flushed, is no divisor
            scaled = DIV(blocks, self._power(exponent))
        else:
            scaled = MUL(blocks, self._power(exponent.neg()))
        if self.mode in ("up", "down"):
            # What the division has flushed to zero was not zero.
            bits = blocks.view(binary.integer)
            least = (binary.bias - 126) << binary.mantissa
            tiny = OR(AND(bits, binary.sign), least).view(binary.dtype)
            is_lost = LT(AND(scaled.view(binary.integer), binary.magnitude), least)
            is_lost = AND(is_lost, NE(AND(bits, binary.magnitude), 0))
            scaled = WHERE(is_lost, tiny, scaled)
        return self.element.round(scaled, noise)

    def _power(self, exponent: Tensor) -> Tensor:
        """Returns 2**exponent."""
        binary = self.binary
        bits = LEFT(ADD(exponent, binary.bias), binary.mantissa)
        if binary.mantissa == 23:
            bits = bits.masked_fill_(EQ(bits, 0), 1 << 22)  # 2**-127 is subnormal
        return bits.view(binary.dtype)

    def kernel_spec(self, grid: Grid = NO_GRID) -> Any:
        """Returns the kernel's ``scaled_spec``, or its ``block_spec``."""
        if self.binary is FP32:
            return self._scaled("mx" if self._is_float else "e8m0").kernel_spec(grid)
        assert isinstance(self.element, FloatPlan)
        extent = (grid.rows, grid.columns) if grid.is_across else (grid.columns, 1)
        numbers = (
            *self.element.kernel_numbers(),
            self.max_exponent,
            self.carry,
            self.size,
            *extent,
        )
        return (ctypes.c_int64 * 13)(*numbers)

    def decoding_spec(self, grid: Grid) -> Any:
        """Returns the kernel's ``scaled_spec``."""
        return self._scaled("mx").kernel_spec(grid)

    @property
    def has_kernel(self) -> bool:
        """Whether there is a kernel for this type and mode."""
        return super().has_kernel and (self._is_float or self.binary is FP32)

    @property
    def symbol(self) -> str:
        """The kernel's function in the compiled library."""
        return "scaled_f32" if self.binary is FP32 else super().symbol

    @classmethod
    def symbols(cls) -> tuple[str, ...]:
        """Returns the kernel's functions for all types; that for float32 is a `ScaledPlan`'s."""
        return ("block_f64",)

    @property
    def _is_float(self) -> bool:
        return isinstance(self.element, FloatPlan)

    @property
    def lowest(self) -> int:
        """The least shared exponent."""
        return -127 if self._is_float else -126

    def _scaled(self, scale_format: str) -> ScaledPlan:
        """Returns the same with the kernel of scaled elements."""
        most = math.ldexp(1.0, 127 - self.max_exponent)
        shape = ("rows", self.size, 1, scale_format, False)
        limits = (1.0, 2.0**-126, most, self.max_exponent, self.carry)
        return ScaledPlan(self.binary, self.mode, self.element, *shape, *limits)  # type: ignore[arg-type]

    @classmethod
    def from_constants(cls, binary: Binary, *rest: Any) -> Plan:
        """Returns the plan whose `constants` these are, after its name and its binary's mantissa."""
        mode, element, *others = rest
        family = FloatPlan if element[0] == FloatPlan.__name__ else FixedPlan
        return cls(binary, mode, family(binary, *element[2:]), *others)


@dataclass(frozen=True)
class Block(NumberFormat):
    """Blocks of elements that share a power of two, as in the OCP Microscaling (MX) specification.

    The shared exponent follows from the block's largest magnitude (amax), is from -127 to 127 (in fixed point
    from -126), and stored in 8 bits (E8M0). It is never so large that an element times the scale would be infinite.

    Attributes:
        name: An identifier.
        element: The format of the elements, divided by their block's scale: a `Float`, or a `Fixed` one as
            in MXINT8, whose least number is left out so that it is symmetric.
        size: Elements of a block; the last block of a row may be shorter.
        axis: The axis along which elements form blocks.
        rule: How the shared exponent is chosen, in torchao's words (ScaleCalculationMode). ``"floor"``: that
            of amax less that of the largest element, as the OCP specification has it; amax may
            saturate. ``"rceil"``: the least with which nothing saturates, as Blackwell computes it.
            ``"ceil"``: as ``"floor"``, of the power of two that is not below amax. ``"even"``: as
            ``"floor"``, of amax rounded to the element's mantissa bits.

    Example:
        >>> element = hmpx.formats.Float("e2m1", exponent_bits=2, mantissa_bits=1, kind="finite")
        >>> pairs = hmpx.formats.Block("pairs", element, size=2)
        >>> hmpx.formats.quantize(torch.tensor([1.1, 6.0, 100.0, 600.0]), pairs)
        tensor([  1.,   6., 128., 512.])
    """

    name: str
    element: Float | Fixed
    size: int = 32
    axis: int = -1
    rule: Rule = "floor"

    plans = (BlockPlan,)

    def __post_init__(self) -> None:
        """Checks the fields.

        Raises:
            OptionError: A field has a value that it can't have.
        """
        check_name(self.name)
        if not is_a(self.element, (Float, Fixed)):
            raise OptionError(
                f"format {self.name}: element must be a Float or Fixed, not {shown(self.element)}; "
                "get(name) returns a registered one"
            )
        # Then elements are exact in float32, also divided by their scale and multiplied with it.
        least = 1 if is_a(self.element, Float) else -1
        if (
            not least <= exponent_of(self.element.max) <= 16
            or self.element.smallest_subnormal < 2.0**-22
        ):
            raise OptionError(
                f"format {self.name}: element {self.element.name} must have a largest exponent from "
                f"{least} to 16 and no numbers below 2**-22"
            )
        what = f"format {self.name}: rule"
        object.__setattr__(self, "rule", arguments.choice(what, self.rule, RULES))
        check_int(self.name, "size", self.size, 1, 65536)
        check_int(self.name, "axis", self.axis, -64, 63)

    @property
    def bits(self) -> float:
        """Bits a value, the shared scale's included; codes of elements are whole bytes."""
        return self.element.bits + 8 / self.size

    @property
    def significand_bits(self) -> int:
        """Bits of a normal element's significand, the leading 1 included."""
        return self.element.significand_bits

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next larger number where the scale is 1."""
        return self.element.epsilon

    @property
    def max(self) -> float:
        """The largest number."""
        return math.ldexp(self.element.max, 127 - exponent_of(self.element.max))

    @property
    def smallest_normal(self) -> float:
        """The smallest positive normal element times the smallest scale."""
        return math.ldexp(self.element.smallest_normal, self._lowest)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive element times the smallest scale."""
        return math.ldexp(self.element.smallest_subnormal, self._lowest)

    @property
    def _lowest(self) -> int:
        return -127 if isinstance(self.element, Float) else -126

    # --- rounding ------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """Blocks lie along the axis."""
        return Layout("rows", self.axis)

    def plan_in(self, binary: Binary, mode: str, overflow: Overflow) -> Plan:
        """Returns how to round tensors of a binary type that the format fits in."""
        element = self.element.plan_in(binary, mode, "saturate")
        if isinstance(element, FixedPlan):
            element = replace(element, is_symmetric=True)
        assert isinstance(element, FloatPlan | FixedPlan)
        largest = self.element.max
        added = carry(self.rule, largest, self.significand_bits, binary.mantissa)
        return BlockPlan(binary, mode, element, self.size, exponent_of(largest), added)

    # --- codes ---------------------------------------------------------------------------------

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the scales of values of a shape."""
        found = list(shape) or [1]
        found[self.axis] = -(-found[self.axis] // self.size)
        return tuple(found)

    def encoded(self, values: Tensor, rounded: Tensor, binary: Binary) -> tuple[Tensor, Tensor]:
        """Returns the codes of the elements, and those of their blocks' scales."""
        exact = self.plan(binary.dtype, "nearest", "saturate")
        assert isinstance(exact, BlockPlan)
        before, rows = self._rows(values), self._rows(rounded)
        exponent, is_bad = exact.exponents(exact.split(before))
        elements = exact.scaled(exact.split(rows), exponent, None).masked_fill_(is_bad, math.nan)
        codes = self.element.codes_of(elements, binary)
        codes = codes.flatten(-2)[..., : rows.shape[-1]].to(code_dtype(self.element.bits))
        scales = ADD(exponent, 127).masked_fill_(is_bad, 255).squeeze(-1).to(torch.uint8)
        if rounded.dim() == 0:
            return codes.view(()), scales
        return MOVEDIM(codes, -1, self.axis), MOVEDIM(scales, -1, self.axis)

    def coding(self, binary: Binary) -> Coding | None:
        """Returns what kernels are told to make or read the codes of values of a binary type."""
        if binary is FP32:
            return scaled_coding(self.element)
        if not isinstance(self.element, Float):
            return None
        element = self.element.coding(binary, keeps_sign_of_nan=False)
        return Coding("block", element.spec, can_encode=self.size <= _MOST_ENCODED)

    def _rows(self, x: Tensor) -> Tensor:
        """Returns ``x`` with its axis last, contiguous."""
        x = x.view(1) if x.dim() == 0 else MOVEDIM(x, self.axis, -1)
        return x.contiguous()

    def decoded(self, codes: Any) -> Tensor:
        """Returns the values that the pair (codes, scales) stands for, in float32.

        Raises:
            OptionError: ``codes`` are not as `encoded` returns them.
        """
        return decoded(self, codes)
