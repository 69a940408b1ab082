"""Traces of casts through a program: what was cast again, and back; for `Waste`.

Follows tensors by their memory, so that views are the same; holds none of them alive.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from ..compute import saved_by
from ..ops import kind
from ..policy import CastPolicy
from ..tensors import LOW_DTYPES, PLAIN_TENSORS, edges_of, tensors_in
from ..torch_internals import TELLS_SAVED, is_of_transform
from ..torch_state import place, running_module
from .ledger import Held

if TYPE_CHECKING:
    from .entries import Entry


class Found(NamedTuple):
    """One kind of needless cast, at one place.

    Attributes:
        kind: See `Waste.kind`.
        what: See `Waste.what`.
        module: Where it was seen: the module, and
        location: the line.
        subject: The op or parameter that the fix is about.
        dtype: What the first input of the call was cast to.
        learns: Whether autograd computes a gradient for any of its inputs.
    """

    kind: str
    what: str
    module: str
    location: str
    subject: str
    dtype: torch.dtype
    learns: bool


class _Made(NamedTuple):
    """The call that last wrote to some memory."""

    memory: Any  # a weak reference: while it is held, the address is given to no other memory
    entry: Entry
    before: str  # the op whose result that call took


class _Seen:
    """A tensor that was cast.

    Attributes:
        tensor: A weak reference.
        version: Its version counter then.
        dtypes: What it was cast to since.
    """

    __slots__ = ("dtypes", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = weakref.ref(tensor), _version(tensor)
        self.dtypes: set[torch.dtype] = set()


_MOST: Final = 20_000  # of the memory that is followed at a time


class Traces:
    """Follows casts from call to call."""

    def __init__(self) -> None:
        """Starts without any."""
        self._lock = threading.Lock()
        self._made: dict[int, _Made] = {}
        self._seen: dict[int, _Seen] = {}
        self._most_seen = _MOST  # twice what lived at the last look, so that looks are few
        self._names: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.found: dict[Found, list[int]] = {}

    def note(self, entry: Entry, inputs: list[Tensor], result: Any, node: Any) -> None:
        """Notes the casts of one call.

        Args:
            entry: The calls that this one is like.
            inputs: Its floating inputs, before they were cast.
            result: What it returned.
            node: Its node in autograd's graph, or None.
        """
        call = entry.call
        with self._lock:
            before = ""
            for tensor, given, cast in zip(
                inputs, call.input_dtypes, call.cast_dtypes, strict=True
            ):
                made = self._maker(tensor)
                before = before or ("" if made is None else made.entry.call.op)
                if given is cast:
                    is_promoted = given in LOW_DTYPES and call.dtype is torch.float32
                    if made is not None and is_promoted:
                        self._note_round_trip(entry, made, tensor, torch.float32)
                elif isinstance(tensor, nn.Parameter):
                    self._note_again(entry, tensor, cast, "parameter cast again")
                else:
                    self._note_again(entry, tensor, cast, "tensor cast again")
                    if made is not None:
                        self._note_round_trip(entry, made, tensor, cast)
            for tensor in tensors_in([result]):
                self._note_made(tensor, entry, before)
            if node is not None:
                self._note_kept(entry, inputs, node)

    def _maker(self, tensor: Tensor) -> _Made | None:
        return self._made.get(_memory(tensor))

    def _note_made(self, tensor: Tensor, entry: Entry, before: str) -> None:
        address = _memory(tensor)
        if not address:
            return
        known = self._made.get(address)
        if known is None:
            if len(self._made) >= _MOST:
                self._made = {
                    key: made for key, made in self._made.items() if not made.memory.expired()
                }
                if len(self._made) >= _MOST:
                    self._made.clear()
            memory = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        else:
            memory = known.memory
        self._made[address] = _Made(memory, entry, before)

    def _note_again(self, entry: Entry, tensor: Tensor, dtype: torch.dtype, kind_: str) -> None:
        seen = self._seen.get(id(tensor))
        if seen is None or seen.tensor() is not tensor or seen.version != _version(tensor):
            if len(self._seen) >= self._most_seen:
                self._seen = {k: s for k, s in self._seen.items() if s.tensor() is not None}
                self._most_seen = max(_MOST, 2 * len(self._seen))
            seen = self._seen[id(tensor)] = _Seen(tensor)
        elif dtype in seen.dtypes:
            name = self._name(tensor) if kind_ == "parameter cast again" else entry.call.op
            self._add(_found(kind_, name, entry, name), tensor, dtype)
        seen.dtypes.add(dtype)

    def _note_round_trip(
        self, entry: Entry, made: _Made, tensor: Tensor, dtype: torch.dtype
    ) -> None:
        earlier, op = made.entry.call, made.entry.call.op
        chain = " -> ".join(filter(None, (made.before, op, entry.call.op)))
        if dtype in LOW_DTYPES:
            was_upcast = any(
                given in LOW_DTYPES and cast is torch.float32
                for given, cast in zip(earlier.input_dtypes, earlier.cast_dtypes, strict=True)
            )
            if was_upcast and earlier.cast_policy == CastPolicy.FP32.name:
                self._add(_found("round trip", chain, entry, op), tensor, dtype)
        elif _is_cheap(op) and earlier.cast_policy == CastPolicy.LOW.name:
            given, cast = earlier.input_dtypes[0], earlier.cast_dtypes[0]
            if given is torch.float32 and cast in LOW_DTYPES:
                self._add(_found("round trip", chain, entry, f"-{op}"), tensor, dtype)

    def _note_kept(self, entry: Entry, inputs: list[Tensor], node: Any) -> None:
        """Notes casts of weights that autograd keeps for the backward."""
        call = entry.call
        weights = [
            tensor
            for tensor, given, cast in zip(inputs, call.input_dtypes, call.cast_dtypes, strict=True)
            if given is not cast and isinstance(tensor, nn.Parameter) and tensor.dim() > 1
        ]
        if not weights:
            return
        saved = [each for each in _held_for(node) if each.dtype in LOW_DTYPES]
        for weight in weights:
            for each in saved:
                if each.numel() == weight.numel() and each.dim() == weight.dim():
                    name = self._name(weight)
                    self._add(_found("weight casts kept", name, entry, name), weight, each.dtype)
                    break

    def _add(self, found: Found, tensor: Tensor, dtype: torch.dtype) -> None:
        counts = self.found.setdefault(found, [0, 0])
        counts[0] += 1
        counts[1] += tensor.numel() * dtype.itemsize

    def _name(self, parameter: Tensor) -> str:
        name: str | None = self._names.get(parameter)  # type: ignore[no-untyped-call]
        if name is None:
            name = self._names[parameter] = _name_of(parameter)
        return name


def _found(kind_: str, what: str, entry: Entry, subject: str) -> Found:
    call = entry.call
    learns = any([shape.learns for shape in entry.inputs])  # noqa: C419
    return Found(kind_, what, call.module, call.location, subject, call.cast_dtypes[0], learns)


def _memory(tensor: Tensor) -> int:
    """Returns what identifies the memory of a tensor; 0 where it has none of its own."""
    is_plain = type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided
    if not is_plain or is_of_transform(tensor):
        return 0
    return int(tensor.untyped_storage()._cdata)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _is_cheap(op: str) -> bool:
    """Whether an op gains little by low precision: its time goes to memory."""
    return kind(op)[0] in ("elementwise", "norm")


def _name_of(parameter: Tensor) -> str:
    """Returns the qualified name of a parameter of a running module."""
    module = running_module()
    if module is not None:
        for name, found in module.named_parameters():
            if found is parameter:
                return ".".join(filter(None, (place().path, name)))
    return f"a parameter of shape {tuple(parameter.shape)}"


def _held_for(node: Any) -> Iterator[Tensor]:
    """Yields the tensors that autograd holds for a call itself: neither packed by hooks, nor its casts'."""
    for _ in range(4):  # views of the result come first
        found = saved_by(node)
        edges = edges_of(node)
        if found or len(edges) != 1 or edges[0][0] is None:
            held = [saved.data for saved in found] if TELLS_SAVED else []
            held = [each.tensor if isinstance(each, Held) else each for each in held]
            yield from [each for each in held if isinstance(each, Tensor)]
            return
        node = edges[0][0]
