"""Keys of the noise of stochastic rounding: what a call draws of torch's random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..torch_internals import outside_batches, transforms
from .unpatched import EMPTY, EMPTY_LIKE, RANDINT


def draw_keys(generator: torch.Generator | None) -> tuple[int, int]:
    """Returns two numbers of 32 bits, for one call."""
    device = "cpu" if generator is None else generator.device
    drawn = EMPTY(1, dtype=torch.int64, device=device)
    try:
        key = int(drawn.random_(generator=generator).item())
    except RuntimeError:  # beside a batch of gradients
        with outside_batches():
            key = int(drawn.random_(generator=generator).item())
    return key & 0xFFFFFFFF, key >> 32


def traced_keys(x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Returns two numbers of 32 bits in an int64 tensor on the device of ``x``, for one call.

    Under `torch.vmap` these are two for each of what it maps, whose noise is not to be alike.
    """
    if transforms() is None:
        return _drawn(x, generator, ())
    mapped = EMPTY_LIKE(x, dtype=torch.bool)  # mapped as x is, and without tangents
    return _apply(mapped, generator, ())


def _drawn(x: Tensor, generator: torch.Generator | None, batch: tuple[int, ...]) -> Tensor:
    device = x.device if generator is None else generator.device
    shape = (*batch, 2)
    drawn = RANDINT(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64, device=device)
    return drawn.to(x.device)


class _Keys(torch.autograd.Function):
    """Draws keys where torch.vmap, which refuses random ops, has been left."""

    drawn_as = "keys"

    @staticmethod
    def forward(x: Tensor, generator: torch.Generator | None, batch: tuple[int, ...]) -> Tensor:
        return _drawn(x, generator, batch)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keeps nothing."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        x, generator, batch = inputs
        return _apply(x, generator, (info.batch_size, *batch)), 0


_apply: Callable[..., Tensor] = _Keys.apply
