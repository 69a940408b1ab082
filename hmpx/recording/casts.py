"""Needless casts of a program: repeated casts and round trips, each with a fix.

Follows tensors by their memory, which views share, and keeps none of them alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from ..compute import saved_by
from ..observers import OpCall
from ..ops import kind
from ..policy import CastPolicy
from ..reports import Waste
from ..tensors import LOW_DTYPES, PLAIN_TENSORS, edges_of, tensors_in, version_of
from ..torch_internals import is_of_transform, top_hooks
from ..torch_state import place, running_module
from .signatures import Shape

#: A fix: a line to copy, and its cost.
_Fix = tuple[str, str]

_FREEZE: Final = ("hmpx.freeze(model)", "for inference: stores the weight as it is used")
_KEEP_NONE: Final = (
    "hmpx.convert(keep_weight_casts=False)",
    "the backward casts them again, to the same bits",
)
_METHODS: Final = {
    torch.bfloat16: "bfloat16()",
    torch.float16: "half()",
    torch.float32: "float()",
}

_MOST: Final = 20_000  # pieces of memory followed at a time


class _Made(NamedTuple):
    """The call that last wrote to some memory."""

    memory: Any  # a weak reference to the storage, whose address another one may get
    op: str
    casts: CallCasts
    before: str  # the op whose result that call took


class _CastTensor:
    """A cast tensor: its version counter then, and the dtypes that it was cast to since."""

    __slots__ = ("dtypes", "name", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = weakref.ref(tensor), version_of(tensor)
        self.dtypes: set[torch.dtype] = set()
        self.name = ""  # of a parameter, once it was asked for


class CallCasts:
    """The casts of equal calls, wherever they are made.

    Attributes:
        learns: Whether an input requires gradients.
        inputs: The dtype of each input that is cast or promoted, and whether it is cast.
        round_trips: Whether a cast of the result is low -> the fix of the round trip that it makes.
        kept: Positions of weights whose casts autograd keeps, with their sizes; None where it has not been seen.
    """

    __slots__ = ("inputs", "kept", "learns", "round_trips")

    def __init__(self, call: OpCall, shapes: tuple[Shape, ...]) -> None:
        self.learns = any(shape.learns for shape in shapes)
        self.kept: list[tuple[int, int]] | None = None
        self.inputs: list[tuple[torch.dtype, bool] | None] = [
            (cast, True)
            if given is not cast
            else (torch.float32, False)
            if given in LOW_DTYPES and call.dtype is torch.float32
            else None
            for given, cast in zip(call.input_dtypes, call.cast_dtypes, strict=True)
        ]
        self.round_trips: dict[bool, _Fix] = {}
        dtypes = list(zip(call.input_dtypes, call.cast_dtypes, strict=True))
        was_upcast = any(a in LOW_DTYPES and b is torch.float32 for a, b in dtypes)
        if was_upcast and call.cast_policy == CastPolicy.FP32.name:
            fix = f"bf16.txt: {call.op}", "less accurate: compare before you keep it"
            self.round_trips[True] = fix
        is_cheap = kind(call.op)[0] in ("elementwise", "norm")  # limited by memory
        if is_cheap and call.cast_policy == CastPolicy.LOW.name:
            given, cast = dtypes[0]
            if given is torch.float32 and cast in LOW_DTYPES:
                fix = f"bf16.txt: -{call.op}", "it then computes in the type of its input"
                self.round_trips[False] = fix


class Casts:
    """Follows casts from call to call."""

    def __init__(self) -> None:
        self._made: dict[int, _Made] = {}
        self._seen: dict[int, _CastTensor] = {}
        self._most_seen = _MOST  # twice the number alive at the last check, so that checks are rare
        self._found: dict[tuple[str, str, str, str, _Fix], list[int]] = {}

    def waste(self) -> list[Waste]:
        """Returns the needless casts."""
        return [
            Waste(kind_, what, module, location, times, size_bytes, *fix)
            for (kind_, what, module, location, fix), (times, size_bytes) in self._found.items()
        ]

    def note(
        self, call: OpCall, casts: CallCasts, inputs: list[Tensor], result: Any, node: Any
    ) -> None:
        """Records the casts of one call, ``call`` or one like it.

        ``inputs`` are its floating inputs before casting, ``node`` its node in autograd's graph, or None.
        """
        before = ""
        for tensor, cast in zip(inputs, casts.inputs, strict=True):
            is_weight = cast is not None and cast[1] and isinstance(tensor, nn.Parameter)
            made = None
            if not before or (cast is not None and not is_weight):
                made = self._made.get(_memory(tensor))
            if made is not None and made.memory() is None:
                made = None  # another tensor has its memory now
            if made is not None:
                before = before or made.op
            if cast is None:
                continue
            dtype, is_cast = cast
            if is_cast:
                self._note_again(call, casts, tensor, dtype)
            fix = None if made is None else made.casts.round_trips.get(dtype in LOW_DTYPES)
            if fix is not None and made is not None and not is_weight:
                chain = " -> ".join(filter(None, (made.before, made.op, call.op)))
                self._add("round trip", chain, call, fix, tensor.numel() * dtype.itemsize)
        for tensor in [result] if type(result) in PLAIN_TENSORS else tensors_in([result]):
            self._note_made(tensor, call.op, casts, before)
        if node is not None:
            self._note_kept(call, casts, inputs, node)

    def _note_made(self, tensor: Tensor, op: str, casts: CallCasts, before: str) -> None:
        address = _memory(tensor)
        if not address:
            return
        known = self._made.get(address)
        if known is None and len(self._made) >= _MOST:
            self._made = {k: made for k, made in self._made.items() if made.memory() is not None}
            if len(self._made) >= _MOST:
                self._made.clear()
        if known is not None and known.memory() is not None:
            memory = known.memory
        else:
            memory = weakref.ref(tensor.untyped_storage())
        self._made[address] = _Made(memory, op, casts, before)

    def _note_again(
        self, call: OpCall, casts: CallCasts, tensor: Tensor, dtype: torch.dtype
    ) -> None:
        seen, version = self._seen.get(id(tensor)), version_of(tensor)
        if seen is None or seen.tensor() is not tensor:
            if len(self._seen) >= self._most_seen:
                self._seen = {k: s for k, s in self._seen.items() if s.tensor() is not None}
                self._most_seen = max(_MOST, 2 * len(self._seen))
            seen = self._seen[id(tensor)] = _CastTensor(tensor)
        elif seen.version != version:
            seen.version, seen.dtypes = version, set()
        elif dtype in seen.dtypes:
            size_bytes = tensor.numel() * dtype.itemsize
            if not isinstance(tensor, nn.Parameter):
                low = f"low = x.{_METHODS.get(dtype, 'to(...)')}"
                fix = low, "once, for these calls; in place of x it is less accurate"
                self._add("tensor cast again", call.op, call, fix, size_bytes)
            else:
                weight = f"weight = weight.{_METHODS.get(dtype, 'to(...)')}"
                fix = weight, "once, before it is used; sums its gradients low"
                fix = fix if casts.learns else _FREEZE
                self._add("parameter cast again", _name(tensor, seen), call, fix, size_bytes)
        seen.dtypes.add(dtype)

    def _note_kept(self, call: OpCall, casts: CallCasts, inputs: list[Tensor], node: Any) -> None:
        """Records casts of weights that autograd keeps for the backward."""
        kept = casts.kept
        if kept is None or top_hooks() is not None:
            kept = _kept_by(node, casts, inputs)
            if top_hooks() is None:
                casts.kept = kept
        for position, size_bytes in kept:
            weight = inputs[position]
            name = _name(weight, self._seen[id(weight)])
            self._add("weight casts kept", name, call, _KEEP_NONE, size_bytes)

    def _add(self, kind_: str, what: str, call: OpCall, fix: _Fix, size_bytes: int) -> None:
        key = kind_, what, call.module, call.location, fix
        counts = self._found.get(key)
        if counts is None:
            counts = self._found[key] = [0, 0]
        counts[0] += 1
        counts[1] += size_bytes


def _kept_by(node: Any, casts: CallCasts, inputs: list[Tensor]) -> list[tuple[int, int]]:
    """Returns the positions of weights whose casts autograd keeps for a call, and the sizes of these."""
    weights = [
        (position, tensor)
        for position, (tensor, cast) in enumerate(zip(inputs, casts.inputs, strict=True))
        if cast and cast[1] and isinstance(tensor, nn.Parameter) and tensor.dim() > 1
    ]
    saved = [each for each in _held_for(node) if each.dtype in LOW_DTYPES] if weights else []
    found = []
    for position, weight in weights:
        for each in saved:
            if each.numel() == weight.numel() and each.dim() == weight.dim():
                found.append((position, weight.numel() * each.itemsize))
                break
    return found


def _name(parameter: Tensor, seen: _CastTensor) -> str:
    """Returns the qualified name of a parameter of a running module."""
    if not seen.name:
        seen.name = f"a parameter of shape {tuple(parameter.shape)}"
        module = running_module()
        for name, found in () if module is None else module.named_parameters():
            if found is parameter:
                seen.name = ".".join(filter(None, (place().path, name)))
                break
    return seen.name


def _memory(tensor: Tensor) -> int:
    """Returns an identifier of a tensor's memory; 0 if it has none of its own."""
    is_plain = type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided
    if not is_plain or is_of_transform(tensor):
        return 0
    return int(tensor.untyped_storage()._cdata)


def _held_for(node: Any) -> Iterator[Tensor]:
    """Yields the tensors that autograd holds for the call itself: not packed by hooks, nor held by casts."""
    for _ in range(4):  # views of the result come first
        found = saved_by(node)
        edges = edges_of(node)
        if found or len(edges) != 1 or edges[0][0] is None:
            held = [saved.data for saved in found]
            yield from [each for each in held if isinstance(each, Tensor)]
            return
        node = edges[0][0]
