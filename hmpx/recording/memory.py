"""The memory of tensors: a ledger of when storages are made, held by autograd and freed, and its sums.

The ledger follows storages, which views share, and keeps none of them alive. It only records events, since
the purpose of a storage may be known much later.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from .. import torch_internals
from ..compute import nodes_made, tensors_saved_by
from ..errors import raised_here
from ..observers import spared
from ..reports import Memory, Moment
from ..tensors import tensors_in, tensors_of
from ..torch_internals import DispatchMode, unseen

is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_DETACH: Final = torch.ops.aten.detach.default


class Stored:
    """The memory of one tensor and its views.

    Attributes:
        bytes: Its size.
        dtype: Name of the dtype of the first tensor seen in it.
        kind: One of `reports.KINDS`; ``""`` if it may be saved, or is something else.
        cast_of: The memory that it is a cast of, if a cast made it.
        memory: A weak reference.
    """

    __slots__ = ("bytes", "cast_of", "dtype", "kind", "memory")

    def __init__(self, size_bytes: int, dtype: str, known: Stored | None = None) -> None:
        """Takes over the kind of ``known``, the same memory before its size changed."""
        self.bytes, self.dtype = size_bytes, dtype
        self.kind: str = known.kind if known else ""
        self.cast_of: Stored | None = known.cast_of if known else None
        self.memory: weakref.ref[Any] | None = None

    @property
    def is_weight_cast(self) -> bool:
        """Whether it was made by a cast of a parameter to another dtype."""
        source = self.cast_of
        return source is not None and source.kind == "parameters" and source.dtype != self.dtype


#: An event, its memory, and for new memory the phase.
Event = tuple[Literal["made", "freed", "held", "released"], Stored, str]


class _Saved:
    """The memory that a node saves: until its backward has run, or the node is gone."""

    __slots__ = ("_log", "_stored")

    def __init__(self, stored: list[Stored], log: list[Event]) -> None:
        self._stored, self._log = stored, log
        log.extend([("held", each, "") for each in stored])

    def release(self, *_: Any) -> None:
        """Ends it, unless the backward keeps the graph; a hook after the node's backward."""
        if not (is_dynamo_compiling() or torch_internals.keeps_graph()):
            self.__del__()

    def __del__(self) -> None:
        released, self._stored = self._stored, []
        self._log.extend([("released", each, "") for each in released])


class _Mode(DispatchMode):
    """Records the tensors of each call below autograd."""

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
        ledger, given = self._ledger, tensors_in(args)
        if func is not _DETACH:  # by which autograd saves results
            ledger.note_saved(given)  # by the calls before
        result = torch_internals.call_in(self, func, args, kwargs or {})
        results = tensors_in([result])
        for each in (*given, *results):
            ledger.note(each)
        ledger.results += map(weakref.ref, results)
        if func is torch_internals.CAST_OP and (made := ledger.note(result)) is not None:
            made.cast_of = ledger.note(args[0])
        return result


class Ledger:
    """Records when memory is allocated and freed, in one thread and the backward that it starts."""

    def __init__(self) -> None:
        self._log: list[Event] = []
        self._stored: dict[int, Stored] = {}
        self._parameters: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._is_stepping = False
        #: Results of calls, whose nodes autograd makes afterwards.
        self.results: list[weakref.ref[Tensor]] = []
        self._first_node = 0

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Records events inside the block."""
        with (
            register_module_forward_pre_hook(self._note_call),
            register_optimizer_step_pre_hook(self._note_step),
            register_optimizer_step_post_hook(self._note_state),
            _Mode(self),
        ):
            self._first_node = torch_internals.next_number() or 0
            try:
                yield
            finally:
                self.note_saved([])
                self._note_gradients()

    def memory(self) -> Memory:
        """Returns the sums over all events so far."""
        return _Replay(list(self._log)).memory()

    # --- current memory ----------------------------------------------------------------------------

    @spared
    @unseen
    def note(self, tensor: Tensor) -> Stored | None:
        """Returns the record of a tensor's memory; None if it has none of its own."""
        try:
            storage = torch_internals.storage_of(tensor)
        # Sparse, of another library, or of a lazy module.
        except raised_here(RuntimeError, ValueError):
            return None
        key = storage._cdata
        stored = self._stored.get(key)
        if stored is None:
            if torch_internals.is_tensor_of_tensors(tensor) or torch_internals.is_of_transform(
                tensor
            ):
                return None
            name = str(tensor.dtype).removeprefix("torch.")
            stored = self._start(key, storage, Stored(storage.nbytes(), name))
            if isinstance(tensor, nn.Parameter):
                self._note_parameter(tensor)
        elif stored.bytes != (size_bytes := storage.nbytes()):
            self._log.append(("freed", stored, ""))
            stored = self._start(key, storage, Stored(size_bytes, stored.dtype, stored))
        return stored

    @spared
    @unseen
    def note_saved(self, tensors: list[Tensor]) -> None:
        """Records what the nodes of tensors, and of the last results, save; torch's hooks would change it."""
        if torch_internals.transforms() is not None:
            return
        last = [each for result in self.results if (each := result()) is not None]
        # Asked for its node in a call, a jagged tensor never answers.
        asked = [
            each for each in (*last, *tensors) if not torch_internals.is_tensor_of_tensors(each)
        ]
        found = [
            (node, tensors_saved_by(node)) for node in nodes_made(asked, self._first_node, self)
        ]
        if any(saved is None for _, saved in found):
            return
        self.results.clear()
        for node, saved in found:
            stored = [self.note(each) for each in saved or ()]
            held = _Saved([each for each in stored if each is not None], self._log)
            node.metadata[self] = held
            if stored:
                node.register_hook(held.release)

    def note_module(self, module: nn.Module) -> None:
        """Records the parameters and buffers of a module, and of those inside it."""
        for inside in module.modules():
            if inside in self._modules:
                continue
            self._modules.add(inside)
            for parameter in inside.parameters(recurse=False):
                self._note_parameter(parameter)
            self._mark(inside.buffers(recurse=False), "buffers")

    def _start(self, key: int, storage: torch.UntypedStorage, stored: Stored) -> Stored:
        self._stored[key] = stored
        stored.memory = weakref.ref(storage, lambda _: self._note_freed(key, stored))
        phase = "forward" if torch_internals.current_graph_task() == -1 else "backward"
        self._log.append(("made", stored, "optimizer" if self._is_stepping else phase))
        return stored

    def _note_parameter(self, parameter: Tensor) -> None:
        if (stored := self.note(parameter)) is not None:
            stored.kind = "parameters"
            self._parameters[parameter] = None

    def _note_freed(self, key: int, stored: Stored) -> None:
        self._log.append(("freed", stored, ""))
        if self._stored.get(key) is stored:
            del self._stored[key]

    # --- hooks -------------------------------------------------------------------------------------

    @spared
    @unseen
    def _note_call(self, module: nn.Module, args: Any) -> None:
        if module not in self._modules:
            self.note_module(module)

    @spared
    @unseen
    def _note_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._is_stepping = True
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._note_parameter(parameter)
        self._note_gradients()

    @spared
    @unseen
    def _note_state(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._is_stepping = False
        self._mark(tensors_of(list(optimizer.state.values())), "optimizer state")

    @spared
    @unseen
    def _note_gradients(self) -> None:
        found = [parameter.grad for parameter in self._parameters]
        self._mark([each for each in found if each is not None], "gradients")

    def _mark(self, tensors: Iterable[Tensor], kind: str) -> None:
        for tensor in tensors:
            if (stored := self.note(tensor)) is not None:
                stored.kind = stored.kind or kind


# --- sums ----------------------------------------------------------------------------------------


class _Replay:
    """Replays events: sums by kind at each moment, and those at the peaks."""

    def __init__(self, events: list[Event]) -> None:
        self._live: set[Stored] = set()
        self._held: Counter[Stored] = Counter()
        self._sums: Counter[str] = Counter()
        self._most: Counter[str] = Counter()
        self._saved: Counter[tuple[str, bool]] = Counter()
        self._most_saved: Counter[tuple[str, bool]] = Counter()
        self._phases: dict[str, Moment] = {}
        for what, stored, _ in events:
            is_lasting = stored.kind in ("parameters", "buffers", "optimizer state")
            if what == "made" and is_lasting:  # it counts from the start
                self._change(stored, is_live=True)
        for what, stored, phase in events:
            if what == "made":
                self._change(stored, is_live=True)
                self._note_moment(phase)
            elif what == "freed":
                self._change(stored, is_live=False)
            elif stored.kind not in ("parameters", "buffers"):
                self._hold(stored, 1 if what == "held" else -1)

    def memory(self) -> Memory:
        saved = sorted(self._most_saved.items())
        return Memory(
            parameter_bytes=self._most["parameters"],
            buffer_bytes=self._most["buffers"],
            gradient_bytes=self._most["gradients"],
            optimizer_bytes=self._most["optimizer state"],
            saved={dtype: count for (dtype, is_cast), count in saved if count and not is_cast},
            weight_cast_bytes=sum(count for (_, is_cast), count in saved if is_cast),
            peak=max(self._phases.values(), key=lambda each: each.bytes, default=Moment()),
            phases=tuple(self._phases.values()),
        )

    def _note_moment(self, phase: str) -> None:
        known = self._phases.get(phase)
        if known is None or sum(self._sums.values()) > known.bytes:
            kinds = {kind: count for kind, count in self._sums.items() if count}
            self._phases[phase] = Moment(phase, kinds)

    def _hold(self, stored: Stored, times: int) -> None:
        is_live, before = stored in self._live, self._held[stored]
        if is_live and not (before and before + times):
            self._change(stored, is_live=False)
        self._held[stored] += times
        if not (before and before + times):
            saved = stored.dtype, stored.is_weight_cast
            self._saved[saved] += times * stored.bytes
            if sum(self._saved.values()) > sum(self._most_saved.values()):
                self._most_saved = Counter(self._saved)
        if is_live:
            self._change(stored, is_live=True)

    def _change(self, stored: Stored, *, is_live: bool) -> None:
        """Makes memory live or not; no effect if it already is."""
        if (stored in self._live) is is_live:
            return
        (self._live.add if is_live else self._live.remove)(stored)
        kind = self._kind(stored)
        self._sums[kind] += stored.bytes if is_live else -stored.bytes
        self._most[kind] = max(self._most[kind], self._sums[kind])

    def _kind(self, stored: Stored) -> str:
        if stored.kind not in ("parameters", "buffers") and self._held[stored]:
            return "weight casts" if stored.is_weight_cast else "saved"
        return stored.kind or "other"
