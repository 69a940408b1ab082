"""Batches of gradients: `torch.autograd.grad(is_grads_batched=True)`, `jacobian(vectorize=True)`.

Such a tensor has no memory that is read, and no random numbers are drawn beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from .torch_part import one, rely_on
from .tracing import is_batch


def _are_taken_apart(enter: Any, leave: Any, batched: Any, unbatched: Any) -> bool:
    level = enter()
    try:
        x = batched(one().view(1, 1).expand(2, 1), 0, level)
        return bool(x.shape == (1,) and unbatched(x, level, 2, 0).shape == (2, 1))
    finally:
        leave()


_enter, _leave, _batched, _unbatched = rely_on(
    "torch._C._vmapmode_increment_nesting",
    "torch._C._vmapmode_decrement_nesting",
    "torch._add_batch_dim",
    "torch._remove_batch_dim",
    feature="batches of gradients in number formats",
    since="2.13",
    without="they stop",
    behaves=_are_taken_apart,
    instead=(lambda: 1, lambda: 0, lambda x, dim, level: x, lambda x, level, size, dim: x),
)


def _depth() -> int:
    """Returns how many batches there are of batches, here and now."""
    depth = int(_enter()) - 1
    _leave()
    return depth


@contextlib.contextmanager
def outside_batches() -> Iterator[None]:
    """Draws random numbers inside, which torch refuses to do beside a batch of gradients."""
    depth = _depth()
    for _ in range(depth):
        _leave()
    try:
        yield
    finally:
        for _ in range(depth):
            _enter()


def is_gradient_batch(x: Tensor) -> bool:
    """Whether a tensor is a batch of gradients."""
    return not torch.compiler.is_dynamo_compiling() and is_batch(x) and _depth() > 0


def each_of_batch(function: Callable[[Tensor], tuple[Tensor | None, ...]], x: Tensor) -> list[Any]:
    """Returns what a function makes of each tensor in a batch of gradients, as such batches.

    Gradients pass: those of a batch are those of the tensor that it is made from, so functions that stand
    in for autograd's must be given that.

    Args:
        function: Returns tensors, and None wherever it does for another tensor.
        x: The batch; there may be batches of batches.
    """
    depth = _depth()
    with outside_batches():
        # Of batches that it is not in, the dimension has size 1.
        for level in range(depth, 0, -1):
            x = _unbatched(x, level, 1, 0)
        sizes = x.shape[:depth]
        results = [function(row) for row in x.flatten(0, depth - 1).unbind()]
    return [_as_batch(each, sizes) for each in zip(*results, strict=True)]


def one_of_batch(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Returns the same of a function that returns one tensor."""
    (found,) = each_of_batch(lambda each: (function(each),), x)
    return cast(Tensor, found)


def _as_batch(rows: tuple[Tensor | None, ...], sizes: torch.Size) -> Tensor | None:
    if rows[0] is None:
        return None
    found = torch.stack([row for row in rows if row is not None])
    found = found.view(*sizes, *found.shape[1:])
    for level, size in enumerate(sizes, 1):
        found = found[0] if size == 1 else _batched(found, 0, level)
    return found
