"""The private side of autograd's graph: what a node's outputs are, when and by whom it was made."""

from __future__ import annotations

from typing import Any, Final

import torch

from .torch_part import one, rely_on
from .tracing import transforms

_FLOAT32: Final = torch.float32


def _describe_nodes(*found: Any) -> bool:
    first = one().requires_grad_().exp()
    node: Any = first.exp().grad_fn
    before: Any = first.grad_fn
    (known,) = node._input_metadata
    is_later = node._sequence_nr() > before._sequence_nr()
    return known.dtype is _FLOAT32 and tuple(known.shape) == (1,) and is_later


#: Whether nodes say what they return, and in which order they were made.
_ARE_DESCRIBED: Final[bool] = rely_on(
    "torch.autograd.graph.Node._input_metadata",
    "torch.autograd.graph.Node._sequence_nr",
    feature="dtypes and modules in hmpx.draw",
    since="2.13",
    without="pictures lack them",
    behaves=_describe_nodes,
    instead=(None, None),
) != (None, None)


def outputs_of(node: Any) -> list[tuple[torch.dtype | None, tuple[int, ...] | None]]:
    """Returns the dtype and the shape of each output that ``node`` has a gradient for; None if unknown.

    A size that is a symbol makes a shape unknown.
    """
    if not _ARE_DESCRIBED:
        return []
    found: list[tuple[torch.dtype | None, tuple[int, ...] | None]] = []
    for known in node._input_metadata:
        try:
            shape = tuple([int(size) for size in known.shape])
        except Exception:  # nested tensors have none, symbols may not be guarded on
            shape = None
        found.append((getattr(known, "dtype", None), shape))
    return found


def number_of(node: Any) -> int | None:
    """Returns a number that is greater for nodes made later in the same thread; None if unknown."""
    return int(node._sequence_nr()) if _ARE_DESCRIBED else None


_exp = torch.exp


def next_number() -> int | None:
    """Returns a number that is at most that of the next node made in this thread; None if unknown.

    Inside transforms of torch.func it is: nothing there may be made to require gradients.
    """
    if not _ARE_DESCRIBED or transforms() is not None:
        return None
    with torch.inference_mode(False), torch.enable_grad():
        return number_of(_exp(one().requires_grad_()).grad_fn)


def function_of(node: Any) -> type | None:
    """Returns the `torch.autograd.Function` that made ``node``; None for one of torch's own ops."""
    found = getattr(node, "_forward_cls", None)  # without it, names of classes are shown
    return found if isinstance(found, type) else None
