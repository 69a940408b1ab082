"""The private side of autograd: saved-tensor hooks, memory of tensors, checkpoints, nodes, batches of gradients."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Final, cast

import torch
import torch.utils.checkpoint
from torch import Tensor

from ..errors import raised_here
from .modes import is_batch, transforms
from .torch_part import do_nothing, one, rely_on

#: Saved-tensor hooks: push and pop a pair, the innermost pair or None, and why none are allowed.
push_hooks, pop_hooks, _top_hooks, hooks_refused = rely_on(
    "memory of legalized ops",
    instead=(do_nothing, do_nothing, do_nothing, lambda: "torch has none"),
)


#: Returns the innermost pair of saved-tensor hooks, even while tracing.
top_hooks: Callable[[], tuple[Callable[..., Any], Callable[..., Any]] | None] = functools.partial(
    _top_hooks, True
)


_HIDES_HOOKS: Final = hasattr(torch.utils.checkpoint, "_current_user_saved_tensors_hooks")


def hide_hook(pack: Any, outer: Any) -> None:
    """Makes selective checkpoints ignore a hook of hmpx and see the hook around it."""
    if _HIDES_HOOKS:  # since torch 2.14 they warn about the user's hooks
        pack._checkpoint_internal, pack._user_hooks = True, outer


#: Returns a tensor's ``data``; read before anything is patched.
data_of: Callable[[Tensor], Tensor] = vars(Tensor.__mro__[1])["data"].__get__


#: Returns a tensor's memory; read before anything is patched.
storage_of: Callable[[Tensor], torch.UntypedStorage] = Tensor.untyped_storage


#: Returns the number of the backward pass that this thread computes, -1 if there is none; and whether it keeps
#: what nodes saved.
current_graph_task, keeps_graph = rely_on("phases of calls", instead=(lambda: -1, lambda: True))


_SINCE_2_14: Final = "_checkpoint_without_reentrant_generator_impl"
#: Name in `torch.utils.checkpoint` of the runner of non-reentrant ones; its first argument is the function.
CHECKPOINT_GENERATOR: Final = (
    _SINCE_2_14 if hasattr(torch.utils.checkpoint, _SINCE_2_14) else _SINCE_2_14[: -len("_impl")]
)
rely_on("checkpoints", f"torch.utils.checkpoint.{CHECKPOINT_GENERATOR}")


# --- nodes of the graph -------------------------------------------------------------------------

#: Whether nodes expose their outputs, and the order of their creation.
_ARE_DESCRIBED: Final = rely_on("dtypes and modules in hmpx.draw", instead=(None,)) is not None


def outputs_of(node: Any) -> list[tuple[torch.dtype | None, tuple[int, ...] | None]]:
    """Returns the dtype and the shape of each output for which ``node`` has a gradient; None if unknown.

    A shape with a symbolic size is unknown.
    """
    if not _ARE_DESCRIBED:
        return []
    found: list[tuple[torch.dtype | None, tuple[int, ...] | None]] = []
    for known in node._input_metadata:
        try:
            shape = tuple([int(size) for size in known.shape])
        except raised_here(Exception):  # nested tensors have none; no guards on symbols
            shape = None
        found.append((getattr(known, "dtype", None), shape))
    return found


def number_of(node: Any) -> int | None:
    """Returns a number that increases with each node of a thread; None if unknown."""
    return int(node._sequence_nr()) if _ARE_DESCRIBED else None


_exp = torch.exp


def next_number() -> int | None:
    """Returns a lower bound for the number of this thread's next node; None if unknown.

    It is unknown inside torch.func transforms, where a new tensor can't be made to require gradients.
    """
    if not _ARE_DESCRIBED or transforms() is not None:
        return None
    with torch.inference_mode(False), torch.enable_grad():
        return number_of(_exp(one().requires_grad_()).grad_fn)


def function_of(node: Any) -> type | None:
    """Returns the `torch.autograd.Function` that created ``node``; None for torch's own ops."""
    found = getattr(node, "_forward_cls", None)  # without it, names of classes are shown
    return found if isinstance(found, type) else None


# --- batches of gradients -----------------------------------------------------------------------
# `torch.autograd.grad(is_grads_batched=True)`, `jacobian(vectorize=True)`: such a tensor has no readable
# memory, and torch refuses to draw random numbers with it.


_enter, _leave, _batched, _unbatched = rely_on(
    "batches of gradients in number formats",
    instead=(lambda: 1, lambda: 0, lambda x, dim, level: x, lambda x, level, size, dim: x),
)


def _depth() -> int:
    depth = int(_enter()) - 1
    _leave()
    return depth


@contextlib.contextmanager
def outside_batches() -> Iterator[None]:
    """Allows random numbers, which torch refuses to draw with a batch of gradients."""
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
    """Applies a function to each tensor in a batch of gradients, and returns its results as batches.

    Differentiable: a batch's gradients are those of its underlying tensor, so replacements of autograd
    functions must get that tensor.
    """
    depth = _depth()
    with outside_batches():
        # In the dimension of batches without it, the size is 1.
        for level in range(depth, 0, -1):
            x = _unbatched(x, level, 1, 0)
        sizes = x.shape[:depth]
        results = [function(row) for row in x.flatten(0, depth - 1).unbind()]
    return [_as_batch(each, sizes) for each in zip(*results, strict=True)]


def one_of_batch(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Like `each_of_batch`, for a function that returns one tensor."""
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
