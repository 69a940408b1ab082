"""Rounding on GPUs by the kernels of `kernels.gpu`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..tensors import CAST, is_in_memory
from .kernels import gpu
from .keys import traced_keys
from .plans import Plan
from .torch_rounding import by_traceable_ops
from .unpatched import EMPTY, EMPTY_LIKE


def rounded_on_gpu(x: Tensor, plan: Plan, generator: torch.Generator | None) -> Tensor:
    """Returns ``x`` rounded by a kernel for GPUs, or by torch ops if that fails."""
    x = x.detach()
    is_noisy = plan.mode == "stochastic"
    keys = traced_keys(x, generator) if is_noisy else None
    work = CAST[torch.float32](x)
    # An element's noise depends on its place, not on strides.
    is_moved = EMPTY_LIKE(work).stride() != work.stride() or (is_noisy and not x.is_contiguous())
    if is_moved or not is_in_memory(work):
        work = EMPTY(x.shape, dtype=torch.float32, device=x.device).copy_(x)
    found = gpu.rounded(work, plan, keys)
    if found is None:
        return by_traceable_ops(x, plan, None, generator, None)
    found = CAST[x.dtype](found)
    return EMPTY_LIKE(x).copy_(found) if is_moved else found
