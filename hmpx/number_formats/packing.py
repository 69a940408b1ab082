"""Tensors in formats with shared scales as one tensor of bytes, in which frozen models keep weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..patching import unpatched
from ..torch_internals import FakeTensor
from .codes import decode, encode
from .families import Block, Format, Scaled
from .rounding import quantize
from .unpatched import AND, CLAMP, LEFT, OR, PAD

_cat: Callable[..., Tensor]
(_cat,) = unpatched(torch.cat)


@dataclass(frozen=True)
class Packing:
    """How bytes hold a tensor: scales in float32, the largest value and its place, codes, scales of one byte.

    Values are rounded again where they are used. The largest could then give the tensor another scale, so they stay
    within the magnitude that gave it, which one of them has.
    """

    format: Block | Scaled
    shape: tuple[int, ...]
    has_largest: bool = False

    @property
    def _bits(self) -> int:
        return 4 if self.format.element.bits <= 4 else 8

    @property
    def _counts(self) -> tuple[int, int, int]:
        """The numbers of float32 scales, of bytes of codes, and of scales of one byte."""
        format, scales = self.format, math.prod(self.format.scales_shape(self.shape))
        codes = -(-math.prod(self.shape) * self._bits // 8)
        is_float32 = format.scale_format == "float32"
        return (scales, codes, 0) if is_float32 else (int(format.tensor_scale), codes, scales)

    @property
    def nbytes(self) -> int:
        floats, codes, scales = self._counts
        return 4 * floats + 16 * self.has_largest + codes + scales

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor may be a packed one."""
        return tensor.dtype is torch.uint8 and tuple(tensor.shape) == (self.nbytes,)

    def _split(self, packed: Tensor) -> tuple[Tensor, ...]:
        floats, codes, scales = self._counts
        sizes = [4 * floats + 12 * self.has_largest, 4 * self.has_largest, codes, scales]
        numbers, places, *others = packed.split(sizes)  # type: ignore[no-untyped-call]
        return numbers.view(torch.float32), places.view(torch.int32), *others

    def parts(self, packed: Tensor) -> tuple[Tensor, ...]:
        """Returns codes and scales, as `encode` does."""
        format, floats = self.format, self._counts[0]
        numbers, _, codes, scales = self._split(packed)
        codes = out_of_bytes(codes, self._bits)[: math.prod(self.shape)].reshape(self.shape)
        of_groups = format.scales_shape(self.shape)
        parts = [codes, *([scales.reshape(of_groups)] if self._counts[2] else [])]
        if floats:
            parts.append(numbers[:floats].reshape(() if format.tensor_scale else of_groups))
        return tuple(parts)

    def values(self, packed: Tensor) -> Tensor:
        """Returns values in float32 that round to those of the packed tensor."""
        values = decode(self.parts(packed), self.format)
        if self.has_largest:
            numbers, place, *_ = self._split(packed)
            least, most, largest = numbers[self._counts[0] :].split(1)  # type: ignore[no-untyped-call]
            values = CLAMP(values, least, most)
            values.view(-1).index_copy_(0, place.to(torch.int64), largest)
        return values


def packed(
    x: Tensor,
    format: Format,
    rounding: str,
    overflow: str | None,
    encoded: tuple[Tensor, ...] | None = None,
) -> tuple[Packing, Tensor] | None:
    """Returns how bytes hold a tensor, and these; None if they can't. Its codes and scales may be known."""
    if not isinstance(format, Block | Scaled) or format.element.bits > 8 or x.numel() >= 1 << 31:
        return None
    codes, *scales = encoded or encode(x, format, rounding, overflow)
    floats = scales[-1:] if scales[-1].dtype is torch.float32 else []
    parts = [*floats, *scales[: len(scales) - len(floats)]]
    parts.insert(len(floats), in_bytes(codes.flatten(), 4 if format.element.bits <= 4 else 8))
    parts = [each.flatten().view(torch.uint8) for each in parts]
    packing, found = Packing(format, tuple(x.shape)), _cat(parts)
    if isinstance(x, FakeTensor) or x.is_meta:
        return packing, found
    values = packing.values(found)
    if isinstance(format, Scaled) and format.tensor_scale:
        place, amax = x.abs().flatten().argmax().reshape(1), format.amax(x).reshape(1)
        numbers = _cat([-amax, amax, x.flatten()[place]]).to(torch.float32)
        parts[1:1] = [numbers.view(torch.uint8), place.to(torch.int32).view(torch.uint8)]
        packing, found = replace(packing, has_largest=True), _cat(parts)
        values = packing.values(found)
    rounded, expected = (quantize(each, format, rounding, overflow) for each in (values, x))
    is_same = torch.equal(rounded.view(torch.int32), expected.view(torch.int32))
    return (packing, found) if is_same else None


def in_bytes(codes: Tensor, bits: int, multiple: int = 1) -> Tensor:
    """Returns codes of 4 or 8 bits in bytes, the first ones low; rows are filled up to a multiple of bytes."""
    codes = PAD(codes, (0, -codes.shape[-1] % (multiple * 8 // bits)))
    return codes if bits == 8 else OR(codes[..., ::2], LEFT(codes[..., 1::2], 4))


def out_of_bytes(held: Tensor, bits: int) -> Tensor:
    """Returns the codes that `in_bytes` holds, with those that fill up rows."""
    if bits == 8:
        return held
    pairs = held.to(torch.int16)
    return AND(OR(pairs, LEFT(pairs, 4)), 0x0F0F).view(torch.uint8)
