"""A tensor's place in autograd's graph."""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

#: The key under which a node's metadata holds the nodes before it.
_BEFORE: Final = "hmpx.before"


def node_of(tensor: Tensor) -> Any:
    """Returns the autograd node that created a tensor, or None.

    Torch raises an error for a view made without gradients whose base was written to: this returns None.

    Example:
        >>> node_of(torch.ones(2, requires_grad=True).exp()).name()
        'ExpBackward0'
    """
    try:
        node = tensor.grad_fn
    except RuntimeError:
        return None
    if node is not None:
        edges_of(node)
    return node


def edges_of(node: Any) -> tuple[tuple[Any, int], ...]:
    """Returns a node's edges: the nodes before it, or None, and which of their outputs it takes.

    From then on the node's metadata holds the edges. Torch frees nodes that Python has seen recursively, which
    overflows the stack for chains of thousands. Python limits the recursion for its own containers.

    Example:
        >>> node = node_of(torch.ones(2, requires_grad=True).exp().log())
        >>> [before.name() for before, _ in edges_of(node)]
        ['ExpBackward0']
    """
    edges: tuple[tuple[Any, int], ...] = node.next_functions
    if edges:
        node.metadata[_BEFORE] = edges
    return edges


def is_leaf(tensor: Tensor) -> bool:
    """Whether no operation known to autograd created a tensor; False for a view without this information.

    Example:
        >>> is_leaf(torch.ones(2, requires_grad=True))
        True
    """
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False
