"""The way back of a frozen model, which may be stopped anywhere and is then taken again.

From before the first weight changes until the last is back, the model reaches it by its hooks, so that its next
call or freeze completes what an exception has stopped, be it the end of what `freeze` returned.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn

from .. import patches, torch_state
from ..errors import FreezeError, to_the_end
from ..forks import new_lock
from ..tensors import PLAIN_TENSORS
from ..torch_internals import FakeTensor
from .layer_cast import restore_class
from .weights import Slot, has_changed


@dataclass(frozen=True, eq=False)
class _Original:
    """A tensor's former contents: its storage, or a copy in host memory, and its geometry."""

    tensor: Tensor
    slots: tuple[Slot, ...]
    storage: torch.UntypedStorage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    is_inference: bool
    requires_grad: bool


class Originals:
    """The storages that a model's weights had before freezing."""

    def __init__(self, slots: Iterable[Slot], kept_alive: Container[int] | None) -> None:
        """Keeps the current contents; in host memory, except storages in ``kept_alive``, which live on anyway.

        Without these, the storages themselves.
        """
        #: Copies of storages on other devices; aliases stay aliases.
        self._copies: dict[tuple[int, torch.device], torch.UntypedStorage] = {}
        by_tensor: dict[int, dict[tuple[int, str], Slot]] = {}
        for slot in slots:  # modules with several names have several
            place = id(slot.module), slot.attribute
            by_tensor.setdefault(id(slot.tensor), {}).setdefault(place, slot)
        each_once = [tuple(each.values()) for each in by_tensor.values()]
        self.kept = [self._original(each, kept_alive) for each in each_once]
        self._copies.clear()

    def _original(self, slots: tuple[Slot, ...], kept_alive: Container[int] | None) -> _Original:
        tensor = slots[0].tensor
        storage = tensor.untyped_storage()
        is_here = tensor.device.type == "cpu" or isinstance(tensor, FakeTensor)
        if kept_alive is not None and not is_here and storage._cdata not in kept_alive:
            storage = self._copied(storage, torch.device("cpu"))
        return _Original(
            tensor,
            slots,
            storage,
            int(tensor.storage_offset()),
            tuple(tensor.size()),
            tensor.stride(),
            tensor.is_inference(),
            tensor.requires_grad,
        )

    def _copied(self, storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
        key = (storage._cdata, device)
        if key not in self._copies:
            with torch.inference_mode(False), torch.no_grad():
                empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
                copy = empty.set_(storage).to(device, copy=True)
                self._copies[key] = copy.untyped_storage()
        return self._copies[key]

    def have_places(self) -> bool:
        """Whether a module that held one of these weights is alive."""
        return any(slot.reference() for original in self.kept for slot in original.slots)

    def misplaced(self, model: nn.Module | None) -> Iterator[tuple[Slot, str]]:
        """Yields each slot in ``model`` that can't be restored, and the reason."""
        here = set(map(id, model.modules() if model is not None else ()))
        for original in self.kept:
            for slot in original.slots:
                fault = _fault(slot) if id(slot.reference()) in here else ""
                if fault:
                    yield slot, fault

    def restore(self, left: Container[Slot] = ()) -> None:
        """Gives each tensor its former contents, on its current device, and each slot its tensor.

        Skips tensors with a slot in ``left``. May be repeated after an error.
        """
        skipped = [each for each in self.kept if any(slot in left for slot in each.slots)]
        try:
            for original in self.kept:
                held = [slot for slot in original.slots if slot.reference() and not _fault(slot)]
                if held and original not in skipped:
                    self._give_back(original, held)
        finally:
            self._copies.clear()
        self.kept = skipped

    def _give_back(self, original: _Original, held: list[Slot]) -> None:
        tensor, storage = original.tensor, original.storage
        current = held[0].current()
        assert current is not None
        if storage.device != current.device and not isinstance(tensor, FakeTensor):
            storage = self._copied(storage, current.device)
        mode = tensor.fake_mode if isinstance(tensor, FakeTensor) else contextlib.nullcontext()
        with torch.inference_mode(original.is_inference), torch.no_grad(), mode:
            empty = torch.empty(0, dtype=torch.float32, device=current.device)
            former = empty.set_(storage, original.offset, original.size, original.stride)
            tensor.data = former
            tensor.requires_grad_(original.requires_grad)
        for slot in held:
            if slot.current() is not tensor:
                slot.container[slot.attribute] = tensor


def _fault(slot: Slot) -> str:
    """Returns why the slot can't get its weight back; ``""`` if it holds the weight, or a copy of it."""
    current = slot.current()
    if current is None:
        if slot.attribute in getattr(slot.module, "parametrizations", ()):
            return "computed by a parametrization"
        return "no longer a parameter or buffer of its module"
    if current.is_meta:
        return "on the meta device, which holds no values"
    if current is slot.tensor or _is_copy(current, slot.tensor):
        return ""
    return "replaced by another tensor"


def _is_copy(current: Tensor, tensor: Tensor) -> bool:
    """Whether ``current`` is a copy of ``tensor`` made by ``Module.to``, not a value set by the user."""
    if type(current) not in PLAIN_TENSORS or current.layout is not torch.strided:
        return False
    if current.shape != tensor.shape:
        return False
    with torch.no_grad(), torch_state.without_casts():
        return not has_changed(current.detach(), tensor.detach().to(current.device, current.dtype))


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
        return {**vars(self), "originals": None, "_tensors": [], "_modules": []}

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
            hook = inspect.unwrap(getattr(found, "hook", found))  # torch, a conversion wrap some
            if isinstance(hook, Hook):
                yield hooks, key, hook
