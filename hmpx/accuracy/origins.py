"""Where values lost precision: the call whose result first had low contents."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..observers import OpCall
from ..places import located
from ..tensors import LOW_DTYPES, tensors_in
from .effective import contents, is_readable


class Origins:
    """Follows low contents from call to call: through upcasts, copies and views."""

    def __init__(self) -> None:
        """Knows no tensor."""
        self._origins: MutableMapping[Tensor, str] = (
            WeakTensorKeyDictionary()
        )  # low contents -> where they were made low
        # Tensor -> its version, and its contents then
        self._known: MutableMapping[Tensor, tuple[int | None, torch.dtype | None]]
        self._known = WeakTensorKeyDictionary()

    def contents(self, tensor: Tensor) -> torch.dtype | None:
        """Returns `contents` of ``tensor``, computed once as long as nothing writes to it.

        None, too, for tensors whose values can't be read.
        """
        if not is_readable(tensor):
            return None
        version = None if tensor.is_inference() else tensor._version
        known = self._known.get(tensor)
        if known is None or known[0] != version or version is None:
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

    def _found(self, tensor: Tensor) -> str | None:
        base = tensor._base
        return self._origins.get(tensor) or (None if base is None else self._origins.get(base))

    def origin(self, tensor: Tensor) -> str:
        """Returns the call that made these contents low: ``"in linear of mlp.up (train.py:40)"``.

        ``"before the first observed call"`` for parameters and for inputs of the program.
        """
        return self._found(tensor) or "before the first observed call"
