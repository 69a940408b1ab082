"""Random bits for stochastic rounding."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from .bits import Binary
from .unpatched import AND, MUL, RIGHT, XOR

Key: TypeAlias = "int | Tensor"


def random_bits(numel: int, start: int, keys: tuple[Key, Key], device: torch.device) -> Tensor:
    """Returns random int32, a hash of (index, keys).

    Args:
        numel: How many.
        start: The first one's index.
        keys: Two numbers or 0-dim tensors, int32.
        device: Where.
    """
    # An index has 32 bits, as many as an element of the result.
    index = torch.arange(numel, dtype=torch.int64, device=device).to(torch.int32)
    index = index.add_((start + 2**31) % 2**32 - 2**31)
    key = keys[0]  # one for each of what torch.vmap maps, which the index is not
    mixed = XOR(index, key) if isinstance(key, Tensor) else index.bitwise_xor_(key)
    mixed = mixed.bitwise_xor_(RIGHT(mixed, 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    mixed = mixed.bitwise_xor_(keys[1])
    mixed = mixed.bitwise_xor_(RIGHT(mixed, 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - 2**32)
    return mixed.bitwise_xor_(RIGHT(mixed, 16).bitwise_and_(0xFFFF))


def uniform(noise: Tensor, binary: Binary) -> Tensor:
    """Returns numbers above 0 and up to 1, as many different ones as the type holds exactly."""
    if binary.mantissa == 23:
        steps = RIGHT(noise, 8).bitwise_and_(0xFFFFFF).add_(1)
        return MUL(steps.to(binary.dtype), 2.0**-24)
    steps = AND(noise.to(torch.int64), 0xFFFFFFFF).add_(1)
    return MUL(steps.to(binary.dtype), 2.0**-32)
