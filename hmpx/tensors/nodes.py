"""A tensor's place in autograd's graph."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def node_of(tensor: Tensor) -> Any:
    """Returns the autograd node that made a tensor; None if none did.

    A view made without gradients refuses to tell it once its base was written to: it has none.

    Example:
        >>> node_of(torch.ones(2, requires_grad=True).exp()).name()
        'ExpBackward0'
    """
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def is_leaf(tensor: Tensor) -> bool:
    """Whether no operation that autograd knows of made a tensor; False for a view that refuses to tell.

    Example:
        >>> is_leaf(torch.ones(2, requires_grad=True))
        True
    """
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False
