"""The way back of a frozen model, which may be stopped anywhere and is then taken again.

From before the first weight changes until the last is back, the model reaches it by its hooks, so that its next
call or freeze completes what an exception has stopped, be it the end of what `freeze` returned.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Final

from torch import Tensor, nn

from .. import patches, torch_state
from ..errors import FreezeError, to_the_end
from ..forks import new_lock
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


#: Held while weights are exchanged, so that two threads don't take each other's for the originals.
LOCK: Final = new_lock()


class Undo:
    """Restores a model's fp32 weights, and removes the hooks of its freezing."""

    def __init__(self, model: nn.Module, originals: Originals) -> None:
        self.key = object()
        self.originals: Originals | None = originals  # None once they are given up
        #: Whether `freeze` has not ended, or this has begun and not ended.
        self.has_begun = True
        self.is_done = False
        #: What `freeze` returned, weakly.
        self.owner: Callable[[], object] = lambda: self
        self.model = weakref.ref(model)
        self._tensors = [original.tensor for original in originals.kept]
        self._modules = [weakref.ref(module) for module in model.modules()]

    def __getstate__(self) -> dict[str, Any]:
        """Copies have no way back."""
        emptied: dict[str, Any] = {"originals": None, "_tensors": [], "_modules": []}
        return {**vars(self), **emptied}

    @property
    def is_due(self) -> bool:
        """Whether the next call is to complete it: an exception has stopped it, or its owner is gone."""
        is_over = self.is_done or self.originals is None
        return not is_over and (self.has_begun or self.owner() is None)

    def __call__(self, refuse: Callable[[dict[Slot, str]], FreezeError] | None = None) -> None:
        """Restores all weights that are in their places, whatever signal handlers raise meanwhile.

        Raises ``refuse(faults)`` and changes nothing if some are not; and at the end what was raised.
        """
        self.has_begun = True
        try:
            with LOCK:
                to_the_end(lambda: self._restore(refuse))
        finally:
            patches.forget_compiled()  # takes locks of torch

    def _restore(self, refuse: Callable[[dict[Slot, str]], FreezeError] | None) -> None:
        if self.originals is not None:
            with torch_state.apart():
                misplaced = dict(self.originals.misplaced(self.model()))
                if refuse is not None and misplaced:
                    self.has_begun = False
                    raise refuse(misplaced)
                self.originals.restore(misplaced.keys())
                modules = [module for each in self._modules if (module := each()) is not None]
                for hooks, key, hook in chain(
                    *map(hooks_of, modules), *map(hooks_of, self._tensors)
                ):
                    if hook.key is self.key:
                        hooks.pop(key, None)
                for module in modules:
                    restore_class(module)
            self.is_done = not self.originals.kept
        self.has_begun = False

    def complete(self) -> None:
        """Restores all if that `is_due`."""
        with LOCK:
            if self.is_due:
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
