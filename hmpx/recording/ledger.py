"""A ledger of tensors' memory: when each storage is made and freed, and what autograd holds.

Follows storages, so that views are the same; keeps none of them alive. It only notes what happens;
`replay` makes sums of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from ..blocks import hooked
from ..reports import Memory
from ..tensors import tensors_of
from ..torch_internals import (
    CAST_OP,
    TorchDispatchMode,
    current_graph_task,
    is_of_transform,
    is_tensor_of_tensors,
    storage_of,
)
from .replay import Event, Replay, Stored, What


class Held:
    """A tensor that autograd holds.

    Attributes:
        tensor: The tensor.
    """

    __slots__ = ("_log", "_stored", "tensor")

    def __init__(self, tensor: Tensor, stored: Stored, log: list[Event]) -> None:
        """Notes that it is held."""
        self.tensor, self._stored, self._log = tensor, stored, log
        log.append((What.HELD, stored, ""))

    def __del__(self) -> None:
        self._log.append((What.RELEASED, self._stored, ""))


class _Mode(TorchDispatchMode):  # type: ignore[misc]
    """Tells the ledger of each call below autograd."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        ledger = self._ledger
        for value in args:
            if isinstance(value, Tensor):
                ledger.note(value)
            elif isinstance(value, (list, tuple)):
                for each in value:
                    if isinstance(each, Tensor):
                        ledger.note(each)
        result = func(*args, **kwargs) if kwargs else func(*args)
        if isinstance(result, Tensor):
            made = ledger.note(result)
            if func is CAST_OP and made is not None:
                made.cast_of = ledger.note(args[0])
        elif isinstance(result, (list, tuple)):
            for each in result:
                if isinstance(each, Tensor):
                    ledger.note(each)
        return result


class Ledger:
    """Notes when memory is taken and given back, by one thread and the backward that it starts."""

    def __init__(self) -> None:
        """Notes nothing until `noting` is begun."""
        self._log: list[Event] = []
        self._stored: dict[int, Stored] = {}
        self._parameters: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._is_stepping = False

    def noting(self) -> Generator[None, None, None]:
        """Notes what happens from the first step of this generator until it is closed."""
        with (
            hooked(
                (register_module_forward_pre_hook, self._note_call),
                (register_optimizer_step_pre_hook, self._note_step),
                (register_optimizer_step_post_hook, self._note_state),
            ),
            torch.autograd.graph.saved_tensors_hooks(self._pack, _tensor_of),
            _Mode(self),
        ):
            try:
                yield
            finally:
                self._note_gradients()

    def memory(self) -> Memory:
        """Returns the sums over all that was noted so far."""
        return Replay(list(self._log)).memory()

    # --- what there is -----------------------------------------------------------------------------

    def note(self, tensor: Tensor) -> Stored | None:
        """Returns what is known of the memory of a tensor; None where it has none of its own."""
        try:
            storage = storage_of(tensor)
        except (NotImplementedError, RuntimeError):  # sparse, or of another library
            return None
        key = storage._cdata
        stored = self._stored.get(key)
        if stored is None:
            if is_tensor_of_tensors(tensor) or is_of_transform(tensor):
                return None
            name = str(tensor.dtype).removeprefix("torch.")
            stored = self._start(key, storage, Stored(storage.nbytes(), name))
            if isinstance(tensor, nn.Parameter):
                self._note_parameter(tensor, stored)
        elif stored.bytes != (size_bytes := storage.nbytes()):
            self._log.append((What.FREED, stored, ""))
            stored = self._start(key, storage, stored.resized(size_bytes))
        return stored

    def note_module(self, module: nn.Module) -> None:
        """Notes the parameters and buffers of a module, and of those inside it."""
        for inside in module.modules():
            if inside in self._modules:
                continue
            self._modules.add(inside)
            for parameter in inside.parameters(recurse=False):
                if (stored := self.note(parameter)) is not None:
                    self._note_parameter(parameter, stored)
            for buffer in inside.buffers(recurse=False):
                if (stored := self.note(buffer)) is not None:
                    stored.kind = stored.kind or "buffers"

    def _start(self, key: int, storage: torch.UntypedStorage, stored: Stored) -> Stored:
        self._stored[key] = stored
        stored.memory = weakref.ref(storage, lambda _: self._note_freed(key, stored))
        self._log.append((What.MADE, stored, self._phase()))
        return stored

    def _note_parameter(self, parameter: Tensor, stored: Stored) -> None:
        stored.kind = "parameters"
        self._parameters[parameter] = None

    def _note_freed(self, key: int, stored: Stored) -> None:
        self._log.append((What.FREED, stored, ""))
        if self._stored.get(key) is stored:
            del self._stored[key]

    def _phase(self) -> str:
        if self._is_stepping:
            return "optimizer"
        return "forward" if current_graph_task() == -1 else "backward"

    # --- hooks -------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Any:
        stored = self.note(tensor)
        return tensor if stored is None else Held(tensor, stored, self._log)

    def _note_call(self, module: nn.Module, args: Any) -> None:
        if module not in self._modules:
            self.note_module(module)

    def _note_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._is_stepping = True
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if (stored := self.note(parameter)) is not None:
                    self._note_parameter(parameter, stored)
        self._note_gradients()

    def _note_state(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._is_stepping = False
        self._mark(tensors_of(list(optimizer.state.values())), "optimizer state")

    def _note_gradients(self) -> None:
        found = [parameter.grad for parameter in self._parameters]
        self._mark([each for each in found if each is not None], "gradients")

    def _mark(self, tensors: Iterable[Tensor], kind: str) -> None:
        for tensor in tensors:
            if (stored := self.note(tensor)) is not None:
                stored.kind = stored.kind or kind


def _tensor_of(held: Any) -> Tensor:
    return held.tensor if isinstance(held, Held) else held
