"""Torch's unpatched functions: op lists may name any of them.

Methods that end in "_" need no copy here: in-place ops keep their tensor's dtype for any list.
"""

from __future__ import annotations

import torch

from ..patching import unpatched

ABS, ADD, SUB, MUL, DIV = unpatched(torch.abs, torch.add, torch.sub, torch.mul, torch.div)
FLOOR, TRUNC, CLAMP, AMAX = unpatched(torch.floor, torch.trunc, torch.clamp, torch.amax)
(RECIPROCAL,) = unpatched(torch.reciprocal)
AND, OR, XOR = unpatched(torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor)
LEFT, RIGHT = unpatched(torch.bitwise_left_shift, torch.bitwise_right_shift)
EQ, NE, GT, GE, LT, LE = unpatched(torch.eq, torch.ne, torch.gt, torch.ge, torch.lt, torch.le)
WHERE, SELECT, BUCKETIZE = unpatched(torch.where, torch.index_select, torch.bucketize)
ARANGE, EMPTY, EMPTY_LIKE, RANDINT = unpatched(
    torch.arange, torch.empty, torch.empty_like, torch.randint
)
PERMUTE, PAD, FILL = unpatched(torch.permute, torch.constant_pad_nd, torch.masked_fill)
CLONE, CONTIGUOUS = unpatched(torch.Tensor.clone, torch.Tensor.contiguous)


def taken(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Returns the values at an index of any shape; faster than torch.take, which lacks a rule for vmap."""
    return SELECT(values, 0, index.reshape(-1)).view(index.shape)
