"""Elements that share scales derived from their largest magnitude: rounding and codes."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...errors import OptionError
from ...tensors import CAST
from ..bits import FP32, FP64, Binary, to_float32
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
from ..vocabulary import Overflow
from .fixed import Fixed
from .floats import Float
from .granularity import Granularity, grid, join, noise_index, scales_shape, split
from .number_format import (
    FLOAT32_MOST,
    Coding,
    Kernel,
    MeasuredFormat,
    Params,
    check_codes,
    code_dtype,
    params_of,
)
from .tables import SMALL_TABLE, Table, small_struct, zero_index

Rule: TypeAlias = Literal["floor", "rceil", "ceil", "even"]

#: The rules for the shared exponent, with the names of torchao's ScaleCalculationMode.
RULES: Final[tuple[Rule, ...]] = ("floor", "rceil", "ceil", "even")

#: Scales in e4m3.
E4M3: Final = Float("e4m3", 4, 3, kind="fn")
E4M3_LEAST: Final = 2.0**-6
E4M3_MOST: Final = 448.0
_E4M3_PARAMS: Final = E4M3.params_in(FP32, "nearest", "saturate")
_E4M3_STRUCT: Final = E4M3.kernel(_E4M3_PARAMS).struct

#: In the kernels' order; "mx" is e8m0 in blocks, with ``2**-127``.
_SCALE_FORMATS: Final = ("float32", "e8m0", "e4m3", "mx")

#: The kernels of elements, in the order of their numbers.
_ELEMENTS: Final = ("float", "fixed", "table")


class ScaledParams(NamedTuple):
    """The numbers with which elements that share scales are rounded."""

    binary: Binary
    mode: str
    element: Params  # for elements divided by their scale
    largest: float  # the largest magnitude of an element
    divisor: float  # of a tensor's amax for its scale
    least_scale: float  # of the tensor if it has one, else of blocks
    most_scale: float
    max_exponent: int  # of ``largest``
    carry: int  # added to the bits of a magnitude before its exponent is read


class SharedScales(MeasuredFormat):
    """A format whose elements share scales; its codes are those of elements and scales."""

    if TYPE_CHECKING:
        axis: int

        @property  # of values divided by their scale
        def element(self) -> Float | Fixed | Table: ...

        @property  # which values share a scale
        def granularity(self) -> Granularity: ...

        @property  # that of `Scaled`, or "mx" in a `Block`
        def scale_format(self) -> str: ...

        @property  # how to choose powers of two; None: "rceil"
        def rule(self) -> Rule | None: ...

        @property  # whether scales are divided by one of the whole tensor
        def tensor_scale(self) -> bool: ...

        @property  # the least and the largest scale: of the tensor if it has one, or else of blocks
        def scale_limits(self) -> tuple[float, float]: ...

    @property
    def _largest(self) -> float:
        if isinstance(self.element, Table):
            return max(abs(to_float32(value)) for value in self.element.values)
        return self.element.max

    def scales_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return scales_shape(self.granularity, self.axis, shape)

    def noise_index(self, index: Tensor, x: Tensor) -> Tensor:
        return noise_index(index, x, self.granularity, self.axis)

    def round(
        self, x: Tensor, noise: Tensor | None, p: ScaledParams, scale: Tensor | None = None
    ) -> Tensor:
        """Rounds by given scales in float32, if any."""
        if x.numel() == 0:
            return x.clone()
        binary, blocks = p.binary, split(x, self.granularity, self.axis)
        if scale is not None:
            scale = CLAMP(scale, p.least_scale, p.most_scale)
        tensor_scale = None
        if self.tensor_scale:
            tensor_scale = self._tensor_scale(x, p) if scale is None else scale
        if scale is None or self.tensor_scale:
            scale, inverse = self.block_scales(blocks, tensor_scale, p)
        else:
            scale, inverse = _in_blocks(scale, blocks), None
        if tensor_scale is not None:
            inverse = DIV(RECIPROCAL(tensor_scale), scale)
            scale = MUL(tensor_scale, scale)
        elif self.scale_format == "e4m3":
            inverse = RECIPROCAL(scale)
        by, operand = (DIV, scale) if inverse is None else (MUL, inverse)
        scaled = by(blocks, CAST[binary.dtype](operand))
        if p.mode in ("up", "down"):
            # Restores nonzero values that the division has flushed to zero.
            bits, least = blocks.view(binary.integer), (binary.bias - 126) << binary.mantissa
            is_lost = LT(AND(scaled.view(binary.integer), binary.magnitude), least)
            is_lost = AND(is_lost, NE(AND(bits, binary.magnitude), 0))
            tiny = OR(AND(bits, binary.sign), least).view(binary.dtype)
            scaled = WHERE(is_lost, tiny, scaled)
        noise = None if noise is None else split(noise, self.granularity, self.axis)
        elements = self.element.round(scaled, noise, p.element)
        values = MUL(CAST[scale.dtype](elements), scale)  # float32 numbers, except in blocks
        return CAST[binary.dtype](join(values, x))

    def element_params(self, binary: Binary, mode: str) -> Params:
        element = self.element
        if isinstance(element, Table):  # its values are float32 numbers
            element = replace(element, values=tuple(map(to_float32, element.values)))
        p: Params = element.params_in(binary, mode, "saturate")
        return p._replace(least=-p.most) if isinstance(element, Fixed) else p

    def params_in(self, binary: Binary, mode: str, overflow: Overflow) -> ScaledParams:
        largest, (least, most) = self._largest, self.scale_limits
        amax_type = binary if self.scale_format == "mx" else FP32
        return ScaledParams(
            binary,
            mode,
            element=self.element_params(binary, mode),
            largest=largest,
            divisor=min(largest * E4M3_MOST, FLOAT32_MOST) if self.tensor_scale else largest,
            least_scale=least,
            most_scale=most,
            max_exponent=exponent_of(largest),
            carry=carry(self.rule or "rceil", largest, self.significand_bits, amax_type.mantissa),
        )

    # --- scales --------------------------------------------------------------------------------

    def scale_of(self, amax: Tensor, p: ScaledParams) -> Tensor:
        """Returns the scales for largest magnitudes, of the tensor if it has one; NaN for infinity."""
        amax = FILL(amax, EQ(amax, math.inf), math.nan)
        if self.scale_format == "e8m0":
            power = _power(self._exponent(amax.view(torch.int32), FP32, p), FP32)
            scale = power.masked_fill_(NE(amax, amax), math.nan)
        else:
            scale = _divided(amax, p.divisor)
        scale = CLAMP(scale, p.least_scale, p.most_scale)
        is_coarse = self.scale_format == "e4m3" and not self.tensor_scale
        return E4M3.round(scale, None, _E4M3_PARAMS) if is_coarse else scale

    def _tensor_scale(self, x: Tensor, p: ScaledParams) -> Tensor:
        every = x.reshape(1, -1) if x.numel() else x.new_zeros(1, 1)
        return self.scale_of(amax_of(every, p.binary), p).reshape(())

    def block_scales(
        self, blocks: Tensor, tensor_scale: Tensor | None, p: ScaledParams
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the scales of blocks, without the tensor's, and factors that replace dividing by them."""
        if self.scale_format != "mx":
            amax = amax_of(blocks, p.binary)
            if tensor_scale is None:
                return self.scale_of(amax, p), None
            scale = CLAMP(DIV(_divided(amax, p.largest), tensor_scale), E4M3_LEAST, E4M3_MOST)
            return E4M3.round(scale, None, _E4M3_PARAMS), None
        most = _most_of(blocks, p.binary)
        exponent = self._exponent(most, p.binary, p)
        scale = _power(exponent, p.binary).masked_fill_(GE(most, p.binary.infinity), math.nan)
        # 2**-127 may be flushed, so it can't be a divisor.
        is_divisor = isinstance(self.element, Fixed)
        return scale, None if is_divisor else _power(exponent.neg(), p.binary)

    def _exponent(self, most: Tensor, binary: Binary, p: ScaledParams) -> Tensor:
        """Returns the exponents of scales from the bits of largest magnitudes."""
        carried = ADD(most, p.carry) if p.carry else most
        exponent = RIGHT(carried, binary.mantissa).sub_(binary.bias + p.max_exponent)
        has_subnormal = self.scale_format == "mx" and not isinstance(self.element, Fixed)
        return CLAMP(exponent, -127 if has_subnormal else -126, min(127 - p.max_exponent, 127))

    # --- kernels -------------------------------------------------------------------------------

    def kernel(self, p: ScaledParams) -> Kernel | None:
        element, is_mx = self.element.kernel(p.element), self.scale_format == "mx"
        table = p.element if isinstance(self.element, Table) else None
        if element is None or element.name not in _ELEMENTS:
            return None
        if table and (p.mode != "nearest" or len(table.values) > SMALL_TABLE):
            return None
        granularity, is_wide = self.granularity, p.binary.width == 64
        if is_wide and not (is_mx and element.name == "float"):
            return None
        is_fixed = element.name == "fixed"
        start = struct.pack(
            "64s64s40s6q",  # scaled_spec until its grid
            element.struct,
            _E4M3_STRUCT,
            element.struct if is_fixed else b"",
            _ELEMENTS.index(element.name),
            _SCALE_FORMATS.index("e8m0" if is_mx and is_fixed else self.scale_format),
            self.tensor_scale,
            p.max_exponent,
            p.carry,
            zero_index(table.values) if table else 0,
        )
        limits = struct.pack("4f", p.largest, p.divisor, p.least_scale, p.most_scale)
        small_table = b"" if table is None else small_struct(table)

        def make(x: Tensor, given: float | None) -> bytes:
            g = grid(x, granularity, self.axis)
            if is_wide:  # block_spec
                extent = (g.rows, g.mid * g.columns) if g.is_across else (g.columns, 1)
                block = struct.pack("5q", p.max_exponent, p.carry, granularity, *extent)
                return element.struct_for(x) + block
            end = struct.pack("f128s4x", given or 0.0, small_table)
            is_whole, is_given = granularity == "tensor", given is not None
            return start + struct.pack("11q", *g[:5], is_whole, *g.places, is_given) + limits + end

        return Kernel(
            "block" if is_wide else "scaled",
            make,
            takes_strides=not isinstance(granularity, tuple) and granularity != "column",
            takes_scale=self.tensor_scale or granularity == "tensor",
        )

    # --- codes ---------------------------------------------------------------------------------

    def coding(self, binary: Binary) -> Coding | None:
        if binary.width == 64:
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
        p, scales_shape = params_of(self, binary.dtype), self.scales_shape(values.shape)
        tensor_scale = self._tensor_scale(values, p) if self.tensor_scale else None
        if values.numel():
            blocks, of_rounded = (split(x, self.granularity, self.axis) for x in (values, rounded))
            block_scale, _ = self.block_scales(blocks, tensor_scale, p)
            scale = block_scale if tensor_scale is None else MUL(tensor_scale, block_scale)
            # The product was rounded to float32, so the quotient is only near an element.
            exact = DIV(CAST[torch.float64](of_rounded), CAST[torch.float64](scale))
            elements = self.element.round(exact, None, self.element_params(FP64, "nearest"))
            elements = elements.masked_fill_(NE(elements, elements), math.nan)  # of one sign
            codes = join(self.element.codes_of(elements, FP64), values)
        else:
            codes = values
            zeros = torch.zeros(scales_shape, dtype=torch.float32, device=values.device)
            block_scale = self.scale_of(zeros, p)
        codes = codes.to(code_dtype(self.element.bits)).contiguous()
        scales = block_scale.reshape(scales_shape).contiguous()
        if self.scale_format == "e4m3":
            scales = E4M3.codes_of(scales, FP32).to(torch.uint8)
        elif self.scale_format != "float32":
            scales = RIGHT(CAST[torch.float32](scales).view(torch.int32), 23).to(torch.uint8)
        return (codes, scales) if tensor_scale is None else (codes, scales, tensor_scale)

    def decoded(self, codes: Any) -> Tensor:
        if not isinstance(codes, tuple | list) or len(codes) != 2 + self.tensor_scale:
            parts = "codes, scales" + ", the tensor's scale" * self.tensor_scale
            raise OptionError(f"format {self.name}: decode takes ({parts})")
        check_codes(codes[0], self.name)
        elements = CAST[torch.float32](self.element.decoded(codes[0]))
        scales = self._read_scales(codes[1], elements.shape)
        if self.tensor_scale:
            scales = MUL(check_scales(codes[2], (), self.name), scales)
        if not elements.numel():
            return elements
        blocks = CAST[torch.float64](split(elements, self.granularity, self.axis))
        scales = _in_blocks(CAST[torch.float64](scales), blocks)
        return join(CAST[torch.float32](MUL(blocks, scales)), elements).contiguous()

    def _read_scales(self, codes: Any, shape: Sequence[int]) -> Tensor:
        if self.scale_format == "float32":
            return check_scales(codes, self.scales_shape(shape), self.name)
        check_codes(codes, self.name)
        codes = check_shape(codes, self.scales_shape(shape), self.name)
        if self.scale_format == "e4m3":
            return E4M3.decoded(codes)
        if self.scale_format == "mx":  # 2**-127 is subnormal in float32
            power = LEFT(ADD(codes.to(torch.int64), FP64.bias - 127), FP64.mantissa)
            powers = power.view(torch.float64)
        else:
            powers = LEFT(codes.to(torch.int32), 23).view(torch.float32)
        return powers.masked_fill(EQ(codes, 255), math.nan)


def amax_of(blocks: Tensor, binary: Binary) -> Tensor:
    """Returns the largest magnitudes of blocks in float32; NaN for those with infinity or NaN."""
    most = _most_of(blocks, binary)
    found = CLAMP(CAST[torch.float32](most.view(binary.dtype)), max=FLOAT32_MOST)
    return found.masked_fill_(GE(most, binary.infinity), math.nan)


def _most_of(blocks: Tensor, binary: Binary) -> Tensor:
    """Returns the bits of the largest magnitudes."""
    dims = [dim for dim in range(1, blocks.dim(), 2) if blocks.shape[dim] != 1] or [-1]
    return AMAX(AND(blocks.view(binary.integer), binary.magnitude), dims, True)


def _in_blocks(scales: Tensor, blocks: Tensor) -> Tensor:
    return scales.reshape([1 if dim % 2 else n for dim, n in enumerate(blocks.shape)])


def _power(exponent: Tensor, binary: Binary) -> Tensor:
    bits = LEFT(ADD(exponent, binary.bias), binary.mantissa)
    if binary.width == 32:
        bits = bits.masked_fill_(EQ(bits, 0), 1 << 22)  # 2**-127 is subnormal
    return bits.view(binary.dtype)


def _divided(amax: Tensor, number: float) -> Tensor:
    """Returns magnitudes divided by a number, as a tensor: some devices multiply by the inverse of numbers."""
    return DIV(amax, EMPTY_LIKE(amax).fill_(number))


def check_scales(scales: object, shape: tuple[int, ...], name: str) -> Tensor:
    """Returns scales in float32; raises `OptionError` if they are not a floating tensor of that shape."""
    if not isinstance(scales, Tensor) or not scales.is_floating_point():
        what = scales.dtype if isinstance(scales, Tensor) else type(scales).__name__
        raise OptionError(f"format {name}: scales must be a floating tensor, not {what}")
    return CAST[torch.float32](check_shape(scales, shape, name))


def check_shape(scales: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    if tuple(scales.shape) != shape:
        raise OptionError(
            f"format {name}: scales must be of shape {shape}, not {tuple(scales.shape)}"
        )
    return scales


def exponent_of(largest: float) -> int:
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
