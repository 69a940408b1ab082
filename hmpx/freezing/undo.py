"""The way back of a frozen model, which may be stopped anywhere and is then taken again.

From before the first weight changes until the last is back, the model reaches it by its hooks, so that its next
call or freeze completes what an exception has stopped. The end of what `freeze` returned completes it, too.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Container, Iterator
from itertools import chain
from typing import Any, Final

from torch import Tensor, nn

from .. import patches, torch_state
from ..errors import to_the_end
from .layer_cast import restore_class
from .originals import Originals
from .weights import Slot

#: The dicts of hooks of a module that freezing adds to.
_HOOKS: Final = (
    "_forward_pre_hooks", "_forward_hooks", "_load_state_dict_pre_hooks", "_state_dict_hooks"
)  # fmt: skip


class Hook:
    """A hook of a frozen model or weight."""

    #: That of the `Undo` that removes it; copies have a key of their own.
    key: object = None

    #: The undo to complete if an exception has stopped it. Copies don't reach it, nor the fp32 weights.
    undo: Undo | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "undo": None}


class Undo:
    """Restores a model's fp32 weights, and removes the hooks of its freezing."""

    def __init__(self, model: nn.Module, originals: Originals) -> None:
        self.key = object()
        self.originals: Originals | None = originals  # None once they are given up
        #: Whether `freeze` has not ended, or this has begun and not ended.
        self.is_due = True
        self.is_done = False
        #: Functions that may be repeated, and end the rest.
        self.more: list[Callable[[], object]] = []
        self._thread = threading.get_ident()
        self._tensors = [original.tensor for original in originals.kept]
        self._modules = [weakref.ref(module) for module in model.modules()]

    def __call__(self, left: Container[Slot] = ()) -> None:
        """Restores all but the slots in ``left``, whatever is raised meanwhile, which it raises at the end."""
        to_the_end(lambda: self._restore(left))

    def _restore(self, left: Container[Slot]) -> None:
        self.is_due = True
        if self.originals is not None:
            with torch_state.apart():
                self.originals.restore(left)
                modules = [module for each in self._modules if (module := each()) is not None]
                for hooks, key, hook in chain(
                    *map(hooks_of, modules), *map(hooks_of, self._tensors)
                ):
                    if hook.key is self.key:
                        hooks.pop(key, None)
                for module in modules:
                    restore_class(module)
                for end in self.more:
                    end()
            self.is_done = not self.originals.kept
        patches.forget_compiled()
        self.is_due = False

    def complete(self) -> None:
        """Restores all if an exception has stopped `freeze` or this, in this thread."""
        if self.is_due and self._thread == threading.get_ident():
            self()


def hooks_of(holder: nn.Module | Tensor) -> Iterator[tuple[dict[int, Any], int, Hook]]:
    """Yields each hook of freezing on a module or weight, with its dict and key there."""
    names = ("_backward_hooks",) if isinstance(holder, Tensor) else _HOOKS
    for hooks in [getattr(holder, name) or {} for name in names]:
        for key, found in list(hooks.items()):
            hook = inspect.unwrap(
                getattr(found, "hook", found)
            )  # torch wraps some, and a conversion
            if isinstance(hook, Hook):
                yield hooks, key, hook
