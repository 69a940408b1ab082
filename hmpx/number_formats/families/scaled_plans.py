"""Rounding by scales derived from the largest magnitudes: any scales, and powers of two as in MX."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeAlias

import torch
from torch import Tensor

from ...tensors import CAST
from ..bits import FP32, FP64, Binary
from ..plans import NO_GRID, Grid, Layout, Plan, struct
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
from .fixed import FixedPlan, FixedSpec
from .floats import BitsPlan, Float, FloatPlan
from .number_format import FLOAT32_MOST
from .tables import TablePlan

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

    def decoding_spec(self, grid: Grid) -> Any:
        """Returns the kernel's ``scaled_spec`` for reading codes."""
        return ScaledPlan.kernel_spec(self, grid)


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
