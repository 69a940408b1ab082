"""The private side of autograd: saved-tensor hooks, memory of tensors, checkpoints."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.utils.checkpoint
from torch import Tensor

from .torch_part import do_nothing, one, rely_on


def _give_to_hooks(push: Any, pop: Any, top: Any, refused: Any) -> bool:
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    x = one().requires_grad_()
    push(pack, _same)
    try:
        x.exp()
        found = top(True)
    finally:
        pop()
    return len(packed) == 1 and found[0] is pack and refused() is None


def _same(tensor: Tensor) -> Tensor:
    return tensor


#: Saved-tensor hooks: open and close a pair, the innermost pair or None, and why none are allowed.
push_hooks, pop_hooks, _top_hooks, hooks_refused = rely_on(
    "torch._C._autograd._push_saved_tensors_default_hooks",
    "torch._C._autograd._pop_saved_tensors_default_hooks",
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch._C._autograd._saved_tensors_hooks_get_disabled_error_message",
    feature="memory of legalized ops",
    since="2.13",
    without="autograd keeps fp32 copies of low-precision tensors",
    behaves=_give_to_hooks,
    instead=(do_nothing, do_nothing, do_nothing, lambda: "torch has none"),
)


def top_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Returns the innermost pair of saved-tensor hooks, even while tracing."""
    return _top_hooks(True)  # type: ignore[no-any-return]


#: Whether torch reports which packed object a saved tensor is.
TELLS_SAVED: Final = hasattr(getattr(torch._C._autograd, "SavedTensor", None), "data")

_HIDES_HOOKS: Final = hasattr(torch.utils.checkpoint, "_current_user_saved_tensors_hooks")


def hide_hook(pack: Any, outer: Any) -> None:
    """Makes selective checkpoints look past a hook of hmpx, to the hook around it."""
    if _HIDES_HOOKS:  # since torch 2.14 they warn about the user's hooks
        pack._checkpoint_internal, pack._user_hooks = True, outer


def _is_data(data: Any) -> bool:
    x = one()
    return bool(data.__get__(x).data_ptr() == x.data_ptr())


_data = rely_on(
    "torch._C.TensorBase.data",
    feature="running statistics in number formats",
    since="2.13",
    without="they take longer",
    behaves=_is_data,
    instead=(property(operator.attrgetter("data")),),
)
#: Returns a tensor's ``data``, taken before anything is patched.
data_of: Callable[[Tensor], Tensor] = _data.__get__


def _counts(use_count: Callable[[Any], int]) -> bool:
    alone, shared = one(), one()
    view = shared.view(1)
    few, more = (use_count(each.untyped_storage()._cdata) for each in (alone, shared))
    return view.numel() == 1 and few < more


_use_count = rely_on(
    "torch._C._storage_Use_Count",
    feature="reuse_casts",
    since="2.13",
    without="no cast is reused",
    behaves=_counts,
    instead=(lambda pointer: sys.maxsize,),
)
_storage = Tensor.untyped_storage
#: Returns a tensor's memory, taken before anything is patched.
storage_of: Callable[[Tensor], torch.UntypedStorage] = _storage


def uses(tensor: Tensor) -> int:
    """Returns the number of references to the memory of ``tensor``."""
    return int(_use_count(_storage(tensor)._cdata))


#: Returns the number of the backward pass that this thread computes; -1 outside of any.
current_graph_task: Callable[[], int] = rely_on(
    "torch._C._current_graph_task_id",
    feature="phases of calls",
    since="2.13",
    without="observers are told that all calls belong to the forward",
    behaves=lambda current: current() == -1,
    instead=(lambda: -1,),
)


def _runs_through(function: Any, name: str) -> bool:
    """Whether a Python function, or one that it calls in its module, uses the name ``name``."""
    pending, seen = [function], set()
    while pending:
        found = pending.pop()
        found = getattr(found, "__wrapped__", found)
        code = getattr(found, "__code__", None)
        if code is None or code in seen:
            continue
        seen.add(code)
        if name in code.co_names:
            return True
        pending += [found.__globals__.get(each) for each in code.co_names]
    return False


#: The function that non-reentrant checkpoints go through: since torch 2.14, and before.
_GENERATORS: Final = (
    "_checkpoint_without_reentrant_generator_impl",
    "_checkpoint_without_reentrant_generator",
)
#: Name in `torch.utils.checkpoint` of what runs a non-reentrant one; the function is its first argument.
CHECKPOINT_GENERATOR: Final = next(
    (name for name in _GENERATORS if hasattr(torch.utils.checkpoint, name)), _GENERATORS[0]
)
rely_on(
    f"torch.utils.checkpoint.{CHECKPOINT_GENERATOR}",
    "torch.utils.checkpoint.checkpoint",
    "torch.utils.checkpoint.CheckpointFunction.forward",
    feature="checkpoints",
    since="2.13",
    without="they would be recomputed under the casts that are in force in backward",
    behaves=lambda generator, checkpoint, forward: (
        _runs_through(checkpoint, CHECKPOINT_GENERATOR)
        and _runs_through(checkpoint, "CheckpointFunction")
    ),
)
