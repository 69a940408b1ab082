"""Rounding by torch ops: where no kernel does it, and in graphs."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ..tensors import CAST, PLAIN_TENSORS
from .keys import traced_keys
from .layouts import Layout
from .noise import Key, random_bits
from .plans import Plan
from .unpatched import EMPTY_LIKE

#: Elements of a part: intermediate results stay in the cache, and calls take little of the time.
_CACHED: Final = 131072

NO_KEYS: Final = (0, 0)


def by_traceable_ops(
    x: Tensor,
    plan: Plan,
    layout: Layout | None,
    generator: torch.Generator | None,
    scale: Tensor | None,
) -> Tensor:
    """Returns ``x`` rounded by torch ops on the whole of it: traceable, on any device."""
    x = x.detach()
    keys: tuple[Key, Key] = NO_KEYS
    if plan.mode == "stochastic":
        drawn = traced_keys(x, generator).to(torch.int32)
        keys = (drawn[0], drawn[1])
    rows = CAST[plan.binary.dtype](x)
    if layout is not None:
        rows = layout.to_rows(rows)
    rounded = rounded_rows(rows, plan, layout, keys, scale)
    if layout is not None:
        rounded = layout.from_rows(rounded, x.shape)
    found = CAST[x.dtype](rounded)
    return as_laid_out(found, x) if type(x) in PLAIN_TENSORS else found.detach()


def as_laid_out(found: Tensor, x: Tensor) -> Tensor:
    """Returns ``found`` with the strides of ``x``, and no view: autograd lets nobody write to such views."""
    if found.stride() == x.stride() or (x.is_contiguous() and found.is_contiguous()):
        return found.detach()
    return EMPTY_LIKE(x).copy_(found)


def rounded_rows(
    rows: Tensor, plan: Plan, layout: Layout | None, keys: tuple[Key, Key], scale: Tensor | None
) -> Tensor:
    """Returns rows rounded by torch ops, by their own scales or by those that are given."""
    noise = None
    if plan.mode == "stochastic":
        noise = random_bits(rows.numel(), 0, keys, rows.device).view(rows.shape)
    if scale is None or layout is None:
        return plan.round(rows, noise)
    scale = CAST[torch.float32](scale.detach())
    return plan.round_by(rows, noise, layout.to_rows(scale) if scale.dim() else scale.view(1))


def round_in_parts(source: Tensor, target: Tensor, plan: Plan, keys: tuple[int, int]) -> None:
    """Rounds contiguous tensors by torch ops, a part at a time that fits into the cache."""
    if not source.numel():
        return
    length = source.shape[-1] if plan.is_by_row and source.dim() else 1
    source, target = source.view(-1, length), target.view(-1, length)
    rows = max(_CACHED // max(length, 1), 1)
    both = (signed(keys[0]), signed(keys[1]))
    for start in range(0, source.shape[0], rows):
        part = source[start : start + rows]
        part = part if plan.is_by_row else part.view(-1)
        noise = None
        if plan.mode == "stochastic":
            noise = random_bits(part.numel(), start * length, both, part.device)
            noise = noise.view(part.shape)
        target[start : start + rows].view(part.shape).copy_(plan.round(part, noise))


def signed(key: int) -> int:
    """Returns a number of 32 bits as a signed one."""
    return key - 2**32 if key >= 2**31 else key
