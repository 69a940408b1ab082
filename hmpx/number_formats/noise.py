"""Random bits for stochastic rounding, and the keys that a call draws from torch's generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from ..torch_internals import outside_batches, transforms
from .bits import Binary
from .unpatched import AND, EMPTY, EMPTY_LIKE, LEFT, MUL, OR, RANDINT, RIGHT, XOR

Key: TypeAlias = "int | Tensor"

#: For calls that need none.
NO_KEYS: Final = (0, 0)


def draw_keys(generator: torch.Generator | None) -> tuple[int, int]:
    """Returns two 32-bit numbers for one call."""
    device = "cpu" if generator is None else generator.device
    drawn = EMPTY(1, dtype=torch.int64, device=device)
    try:
        key = int(drawn.random_(generator=generator).item())
    except RuntimeError:  # in a batch of gradients
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
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Saves nothing."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        x, generator, batch = inputs
        return _apply(x, generator, (info.batch_size, *batch)), 0


_apply: Callable[..., Tensor] = _Keys.apply


def random_bits(numel: int, start: int, keys: tuple[Key, Key], device: torch.device) -> Tensor:
    """Returns ``numel`` random int32, hashes of (index from ``start`` on, keys); keys are int32."""
    # An index has 32 bits, like an element of the result.
    index = torch.arange(numel, dtype=torch.int64, device=device).to(torch.int32)
    index = index.add_((start + 2**31) % 2**32 - 2**31)
    key = keys[0]  # one per item of torch.vmap; the index is not mapped
    mixed = XOR(index, key) if isinstance(key, Tensor) else index.bitwise_xor_(key)
    mixed = mixed.bitwise_xor_(RIGHT(mixed, 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    mixed = mixed.bitwise_xor_(keys[1])
    mixed = mixed.bitwise_xor_(RIGHT(mixed, 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - 2**32)
    return mixed.bitwise_xor_(RIGHT(mixed, 16).bitwise_and_(0xFFFF))


def uniform(noise: Tensor, binary: Binary) -> Tensor:
    """Returns numbers above 0 and up to 1, in the finest steps that the type holds exactly."""
    if binary.mantissa == 23:
        steps = RIGHT(noise, 8).bitwise_and_(0xFFFFFF).add_(1)
        return MUL(steps.to(binary.dtype), 2.0**-24)
    steps = AND(noise.to(torch.int64), 0xFFFFFFFF).add_(1)
    return MUL(steps.to(binary.dtype), 2.0**-32)


def wide(noise: Tensor) -> Tensor:
    """Returns int64 with the noise in both halves, for more than 32 random bits."""
    low = AND(noise.to(torch.int64), 0xFFFFFFFF)
    return OR(LEFT(low, 32), low)
