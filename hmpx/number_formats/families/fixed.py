"""Fixed point."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ...errors import OptionError
from ..bits import Binary, uniform
from ..unpatched import ABS, ADD, AND, CLAMP, EQ, FLOOR, GE, LT, MUL, SUB, TRUNC, WHERE
from ..vocabulary import ROUNDING_MODES, Overflow
from .number_format import CodedFormat, Coding, Figures, Kernel, check_int, check_name

_IN_PLACE: Final = {
    "nearest": Tensor.round_,
    "toward_zero": Tensor.trunc_,
    "up": Tensor.ceil_,
    "down": Tensor.floor_,
}


class FixedParams(NamedTuple):
    """The numbers with which fixed point is rounded."""

    binary: Binary
    mode: str
    scale: float  # the inverse of the last place
    least: int  # in units of the last place
    most: int


@dataclass(frozen=True)
class Fixed(CodedFormat):
    """Fixed point in two's complement: multiples of ``2**-fraction_bits``.

    Attributes:
        name: An identifier.
        integer_bits: Bits before the point, including the sign.
        fraction_bits: Bits after it.

    Example:
        >>> q2_2 = hmpx.formats.Fixed("q2_2", integer_bits=2, fraction_bits=2)
        >>> hmpx.formats.quantize(torch.tensor([0.3, -1.9, 5.0]), q2_2)
        tensor([ 0.2500, -2.0000,  1.7500])
    """

    integer_bits: int
    fraction_bits: int

    def __post_init__(self) -> None:
        check_name(self.name)
        check_int(self.name, "integer_bits", self.integer_bits, 1, 32)
        check_int(self.name, "fraction_bits", self.fraction_bits, 0, 31)
        if not 2 <= self.bits <= 32:
            raise OptionError(
                f"format {self.name}: integer_bits and fraction_bits must be 2 to 32 in all, "
                f"not {self.bits}"
            )

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.integer_bits + self.fraction_bits

    @property
    def _figures(self) -> Figures:
        step = math.ldexp(1.0, -self.fraction_bits)
        return Figures(self.bits - 1, step, ((1 << (self.bits - 1)) - 1) * step, step, step)

    @property
    def min(self) -> float:
        """The least number, one step farther from zero than the largest."""
        return -math.ldexp(1.0, self.integer_bits - 1)

    @property
    def fits_in_float32(self) -> bool:
        return self.is_exact_in_float32

    def params_in(self, binary: Binary, mode: str, overflow: Overflow) -> FixedParams:
        half = 1 << (self.bits - 1)
        return FixedParams(binary, mode, scale=1 / self.epsilon, least=-half, most=half - 1)

    def round(self, x: Tensor, noise: Tensor | None, p: FixedParams) -> Tensor:
        scaled = MUL(x, p.scale)
        if p.mode in _IN_PLACE:
            whole = _IN_PLACE[p.mode](scaled)
        elif p.mode == "nearest_away":
            whole = TRUNC(scaled)
            is_half = GE(ABS(SUB(scaled, whole)), 0.5)
            away = WHERE(LT(scaled, 0), SUB(whole, 1.0), ADD(whole, 1.0))
            whole = WHERE(is_half, away, whole)
        else:
            assert noise is not None
            whole = FLOOR(scaled)
            is_drawn = GE(SUB(scaled, whole), uniform(noise, p.binary))
            whole = WHERE(is_drawn, ADD(whole, 1.0), whole)
        whole = CLAMP(whole, p.least, p.most).mul_(1 / p.scale)
        bits = whole.view(p.binary.integer)  # compilers may treat -0 as 0
        return bits.masked_fill_(EQ(whole, 0), 0).view(p.binary.dtype)

    def kernel(self, p: FixedParams) -> Kernel:
        numbers = p.scale, 1 / p.scale, p.least, p.most
        return Kernel("fixed", struct.pack("q4d", ROUNDING_MODES.index(p.mode), *numbers))

    def codes_of(self, rounded: Tensor, binary: Binary) -> Tensor:
        codes = MUL(rounded, 1 / self.epsilon).nan_to_num_(nan=0.0).to(torch.int64)
        return codes.bitwise_and_((1 << self.bits) - 1)

    def values_of(self, codes: Tensor) -> Tensor:
        half = 1 << (self.bits - 1)
        signed = SUB(AND(ADD(codes, half), 2 * half - 1), half)
        return MUL(signed.to(torch.float64), self.epsilon)

    def coding(self, binary: Binary) -> Coding:
        return Coding("fixed", struct.pack("q2d", self.bits, 1 / self.epsilon, self.epsilon))
