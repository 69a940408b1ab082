"""Where values lost precision: the call whose result first had low contents."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Final

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from ..observers import OpCall
from ..places import located
from ..tensors import LOW_DTYPES, edges_of, node_of, tensors_in, version_of
from .effective import contents, is_readable

#: The key of an origin in the metadata of an autograd node.
_KEY: Final = "hmpx.origin"

#: Views and copies between a call and the next observed one.
_MOST_MOVES: Final = 32

#: Storages known when those that are gone are first removed.
_MOST_STORAGES: Final = 1024


class Origins:
    """Follows low contents from call to call: through upcasts, copies and views.

    Views and most copies are not observed calls. Their origin is found by their autograd nodes, or by their
    storage.
    """

    def __init__(self) -> None:
        """Knows no tensor."""
        self._origins: MutableMapping[Tensor, str] = (
            WeakTensorKeyDictionary()
        )  # low contents -> where they were made low
        self._storages: dict[StorageWeakRef, str] = {}  # likewise, the last one in each
        self._most_storages = _MOST_STORAGES
        # Tensor -> its version, and its contents then
        self._known: MutableMapping[Tensor, tuple[int, torch.dtype | None]]
        self._known = WeakTensorKeyDictionary()

    def contents(self, tensor: Tensor) -> torch.dtype | None:
        """Returns `contents` of ``tensor``, computed once as long as nothing writes to it.

        None, too, for tensors whose values can't be read.
        """
        if not is_readable(tensor):
            return None
        version, known = version_of(tensor), self._known.get(tensor)
        if known is None or known[0] != version or version < 0:
            known = self._known[tensor] = version, contents(tensor)
        return known[1]

    def note(self, call: OpCall, inputs: Iterable[Tensor], result: object) -> None:
        """Notes where the results of a call lost precision."""
        outputs = [each for each in tensors_in([result]) if each.is_floating_point()]
        low = [each for each in outputs if self.contents(each) in LOW_DTYPES]
        if not low:
            return
        known = [each for each in inputs if self.contents(each) is not None]
        before = [each for each in known if self.contents(each) in LOW_DTYPES]
        origin = next(filter(None, map(self._found, before)), None)
        if origin is None and len(before) < len(known):
            place = f" of {call.module}" if call.module else ""
            origin = f"in {call.op}{place} ({located(call.location)})"
        if origin is None:
            return  # all inputs were low before the first observed call
        for each in low:
            self._origins[each] = origin
            self._storages[_storage(each)] = origin
            if (node := node_of(each)) is not None:
                node.metadata[_KEY] = origin
        if len(self._storages) > self._most_storages:
            alive = {
                key: value
                for key, value in self._storages.items()
                if not key.expired()  # type: ignore[no-untyped-call]
            }
            self._storages, self._most_storages = alive, 2 * len(alive) + _MOST_STORAGES

    def _found(self, tensor: Tensor) -> str | None:
        return (
            self._origins.get(tensor) or _of_graph(tensor) or self._storages.get(_storage(tensor))
        )

    def origin(self, tensor: Tensor) -> str:
        """Returns the call that made these contents low: ``"in linear of mlp.up (train.py:40)"``.

        ``"before the first observed call"`` for parameters and for inputs of the program. Without gradients, a
        copy of a result can't be told from an input.
        """
        if found := self._found(tensor):
            return found
        is_known = tensor.requires_grad or isinstance(tensor, nn.Parameter)
        return "before the first observed call" + ("" if is_known else ", or before a copy")


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _of_graph(tensor: Tensor) -> str | None:
    """Returns the origin of the last observed result that ``tensor`` is a view or a copy of."""
    node = node_of(tensor)
    for _ in range(_MOST_MOVES):
        if node is None or (origin := node.metadata.get(_KEY)) is not None:
            return None if node is None else origin
        parents = [parent for parent, _ in edges_of(node) if parent is not None]
        node = parents[0] if len(parents) == 1 else None
    return None
