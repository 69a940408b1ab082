"""Puts weights where cuDNN wants them, without cuDNN."""

from __future__ import annotations

import torch
from torch import nn


def flatten(module: nn.Module, padding: int = 0) -> None:
    """Puts the parameters into one chunk, as ``flatten_parameters`` does on CUDA."""
    parameters = list(module.parameters())
    chunk = torch.full([sum(p.numel() + padding for p in parameters)], torch.nan)
    start = 0
    for p in parameters:
        part = chunk[start : start + p.numel()].view(p.shape)
        part.copy_(p.detach())
        p.data = part
        start += p.numel() + padding
