"""Binary floating-point types: their bit fields, and random bits for stochastic rounding."""

from __future__ import annotations

import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..errors import raised_here
from ..torch_internals import outside_batches, transforms
from .unpatched import AND, EMPTY, EMPTY_LIKE, GE, LEFT, LT, MUL, OR, RANDINT, RIGHT, XOR

Key: TypeAlias = "int | Tensor"

#: For calls that need none.
NO_KEYS: Final = (0, 0)


class Binary(NamedTuple):
    """A binary floating type for computation, and its bit fields as signed integers."""

    dtype: torch.dtype
    integer: torch.dtype  # of the same width
    width: int  # the total number of bits
    mantissa: int  # bits of the mantissa field
    bias: int  # the offset of the exponent field
    sign: int
    magnitude: int  # all bits except the sign
    infinity: int  # the bits of infinity, equal to those of the exponent field
    nan: int

    def bits_of(self, value: float) -> int:
        pack, unpack = ("<f", "<i") if self.width == 32 else ("<d", "<q")
        found: int = struct.unpack(unpack, struct.pack(pack, value))[0]
        return found

    def floor(self, value: Fraction) -> float:
        """Returns the largest number of this type that is not above ``value``."""
        near = float(value) if self.width == 64 else to_float32(float(value))
        while Fraction(near) > value:
            near = self.before(near)
        return near

    def before(self, value: float) -> float:
        """Returns the next number towards minus infinity."""
        bits = self.bits_of(abs(value)) + (-1 if value > 0 else 1)
        pack, unpack = ("<i", "<f") if self.width == 32 else ("<q", "<d")
        found: float = struct.unpack(unpack, struct.pack(pack, bits))[0]
        return found if value > 0 else -found


FP32: Final = Binary(
    torch.float32, torch.int32, width=32, mantissa=23, bias=127, sign=-(1 << 31),
    magnitude=0x7FFFFFFF, infinity=0x7F800000, nan=0x7FC00000,
)  # fmt: skip
FP64: Final = Binary(
    torch.float64, torch.int64, width=64, mantissa=52, bias=1023, sign=-(1 << 63),
    magnitude=0x7FFFFFFFFFFFFFFF, infinity=0x7FF0000000000000, nan=0x7FF8000000000000,
)  # fmt: skip


def ones_if_positive(number: Tensor, binary: Binary) -> Tensor:
    """Returns -1 where an integer is positive, else 0."""
    return number.neg().bitwise_right_shift_(binary.width - 1)


def may_grow(bits: Tensor, mode: str) -> Tensor:
    """Returns whether rounding ``"up"`` or ``"down"`` may increase the magnitude of a number."""
    return GE(bits, 0) if mode == "up" else LT(bits, 0)


def to_float32(value: float) -> float:
    """Returns the float32 nearest to ``value``, which must be in range."""
    found: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return found


# --- random bits -------------------------------------------------------------------------------


def draw_keys(generator: torch.Generator | None) -> tuple[int, int]:
    """Returns two 32-bit numbers for one call."""
    device = "cpu" if generator is None else generator.device
    drawn = EMPTY(1, dtype=torch.int64, device=device)
    try:
        key = int(drawn.random_(generator=generator).item())
    except raised_here(RuntimeError):  # in a batch of gradients
        with outside_batches():
            key = int(drawn.random_(generator=generator).item())
    return key & 0xFFFFFFFF, key >> 32


def traced_keys(x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Returns two 32-bit numbers for one call, in an int64 tensor on the device of ``x``.

    Under `torch.vmap` each mapped item has its own, so that noise differs.
    """
    if transforms() is None:
        return _drawn(x, generator, ())
    mapped = EMPTY_LIKE(x, dtype=torch.bool)  # mapped like x, and without tangents
    return _apply(mapped, generator, ())


def _drawn(x: Tensor, generator: torch.Generator | None, batch: tuple[int, ...]) -> Tensor:
    device = x.device if generator is None else generator.device
    shape = (*batch, 2)
    drawn = RANDINT(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64, device=device)
    return drawn.to(x.device)


class _Keys(torch.autograd.Function):
    """Draws keys outside torch.vmap, which rejects random ops."""

    drawn_as = "keys"

    @staticmethod
    def forward(x: Tensor, generator: torch.Generator | None, batch: tuple[int, ...]) -> Tensor:
        return _drawn(x, generator, batch)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None: ...

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        x, generator, batch = inputs
        return _apply(x, generator, (info.batch_size, *batch)), 0


_apply: Callable[..., Tensor] = _Keys.apply


def random_bits(index: Tensor, keys: tuple[Key, Key]) -> Tensor:
    """Returns random int32, hashes of (index, keys); all are int32."""
    mixed = XOR(index, keys[0])  # a key may be mapped by torch.vmap; the index is not
    mixed = mixed.bitwise_xor_(RIGHT(mixed, 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    mixed = mixed.bitwise_xor_(keys[1])
    mixed = mixed.bitwise_xor_(RIGHT(mixed, 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - 2**32)
    return mixed.bitwise_xor_(RIGHT(mixed, 16).bitwise_and_(0xFFFF))


def uniform(noise: Tensor, binary: Binary) -> Tensor:
    """Returns numbers above 0 and up to 1, in the finest steps that the type holds exactly."""
    if binary.width == 32:
        steps = RIGHT(noise, 8).bitwise_and_(0xFFFFFF).add_(1)
        return MUL(steps.to(binary.dtype), 2.0**-24)
    steps = AND(noise.to(torch.int64), 0xFFFFFFFF).add_(1)
    return MUL(steps.to(binary.dtype), 2.0**-32)


def wide(noise: Tensor) -> Tensor:
    """Returns int64 with the noise in both halves, for more than 32 random bits."""
    low = AND(noise.to(torch.int64), 0xFFFFFFFF)
    return OR(LEFT(low, 32), low)
