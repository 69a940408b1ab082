"""How one forward uses a model's weights, and which of them are stored low for it."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from .. import compute, number_formats, session, torch_state
from ..errors import lined, noted, printable, raised_here, to_the_end
from ..inputs import Steps
from ..policy import LowType, every_decision
from ..reports import ReportTable
from ..tensors import LOW_DTYPES, PLAIN_TENSORS, SEQUENCES, short_name
from ..torch_internals import (
    DispatchMode,
    FakeTensor,
    casts_of_aten,
    is_tensor_of_tensors,
    uncompiled,
)


@dataclass(frozen=True)
class MemorySpan:
    """Where the elements of a tensor lie: the storage, while it is alive, and byte offsets in it."""

    storage: int
    start: int
    end: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def overlaps(self, other: MemorySpan) -> bool:
        """Whether both may share a byte."""
        return self.storage == other.storage and self.start < other.end and other.start < self.end


@dataclass(frozen=True, eq=False)
class Slot:
    """A place for a parameter or buffer in a module, under one of the module's names, and what was found there.

    ``place`` is where its elements lie, or None, and ``fault`` is why they can't be watched.
    """

    path: str  # of the module in the model; "" for the model itself
    reference: Callable[[], nn.Module | None]  # weak
    attribute: str  # the tensor's name in the module
    kind: str  # "parameter" or "buffer"
    tensor: Tensor
    place: MemorySpan | None
    fault: str

    @property
    def name(self) -> str:
        """The slot's name in the model."""
        return f"{self.path}.{self.attribute}" if self.path else self.attribute

    @property
    def module(self) -> nn.Module:
        """The module, which is alive."""
        module = self.reference()
        assert module is not None
        return module

    @property
    def container(self) -> MutableMapping[str, Any]:
        """The module's parameters or buffers by name: a dict, except for modules of TorchScript."""
        return getattr(self.module, f"_{self.kind}s")  # type: ignore[no-any-return]

    def current(self) -> Tensor | None:
        """Returns the tensor in the slot now, if any."""
        container = self.container
        if self.attribute not in container:  # TorchScript's containers have no get
            return None
        found: Tensor | None = container[self.attribute]
        return found


def slots_of(model: nn.Module) -> list[Slot]:
    """Returns the slot of every parameter and buffer under every name, parameters first."""
    return [
        Slot(path, weakref.ref(module), attribute, kind, tensor, *_place_or_fault(tensor))
        for kind in ("parameter", "buffer")
        for path, module in model.named_modules(remove_duplicate=False)
        for attribute, tensor in getattr(module, f"_{kind}s").items()
        if tensor is not None
    ]


def _place_or_fault(tensor: Tensor) -> tuple[MemorySpan | None, str]:
    if nn.parameter.is_lazy(tensor):
        return None, "was not initialized before the example ran"
    if type(tensor) not in PLAIN_TENSORS | {FakeTensor}:
        return None, f"is of class {type(tensor).__name__}"
    if tensor.layout is not torch.strided:
        return None, f"is {str(tensor.layout).removeprefix('torch.')}"
    if tensor.numel() == 0:
        return None, "is empty"
    return _place(tensor), ""


def _place(tensor: Tensor) -> MemorySpan | None:
    """Returns where the elements lie; None if there are none, or not in a single strided memory."""
    try:
        if tensor.layout is not torch.strided or tensor.numel() == 0:
            return None
        storage = tensor.untyped_storage()._cdata
    except raised_here(RuntimeError, ValueError):  # a subclass without a storage
        return None
    last = sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True))
    item_bytes = tensor.element_size()
    start = int(tensor.storage_offset()) * item_bytes
    return MemorySpan(
        storage,
        start,
        start + (int(last) + 1) * item_bytes,
        tensor.dtype,
        tuple(tensor.size()),
        tensor.stride(),
    )


def replaced(model: nn.Module, before: Sequence[Slot]) -> set[MemorySpan]:
    """Returns the places that tensors of the model have left since."""
    now = {(f.kind, f.name): (id(f.tensor), f.place) for f in slots_of(model)}
    return {
        f.place
        for f in before
        if f.place is not None and now.get((f.kind, f.name)) != (id(f.tensor), f.place)
    }


# --- watching ----------------------------------------------------------------------------------


@dataclass
class Uses:
    """How the watched forward used one place: the dtypes it was converted to, its readers and writers.

    ``unrounded_by``: ops in the low-precision list that leave it in fp32. ``decides``: ops whose result
    depends on its stored dtype. ``as_data``: how an op in a number format took it as data, such as "as a first
    input". ``is_read_elsewhere``: not as an attribute of its module, under `other_objects`. ``formats``: those of the ops
    in which it is a weight.
    """

    converted_to: set[LowType] = field(default_factory=set)
    read_by: dict[torch.dtype, list[str]] = field(default_factory=dict)
    unrounded_by: list[str] = field(default_factory=list)
    decides: list[str] = field(default_factory=list)
    written_by: list[str] = field(default_factory=list)
    is_changed: bool = False
    as_data: str = ""
    is_read_elsewhere: bool = False
    formats: set[compute.Formats] = field(default_factory=set)


class UsesMode(DispatchMode):
    """Records every use of the watched places; writes to them can be taken back."""

    def __init__(self, found: Sequence[Slot]) -> None:
        super().__init__()
        self._tensors = {f.place: f.tensor for f in found if f.place is not None}
        self._held = {id(f.tensor) for f in found}
        self.uses = {place: Uses() for place in self._tensors}
        self._by_storage: dict[int, list[MemorySpan]] = {}
        for place in self._tensors:
            self._by_storage.setdefault(place.storage, []).append(place)
        self._before: dict[MemorySpan, tuple[Tensor, Tensor]] = {}
        # Batch norm kernels write to running statistics, which their schema omits.
        with torch.no_grad(), torch_state.without_casts():
            self._remember(f.place for f in found if f.place is not None and f.kind == "buffer")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        touched = [
            (tensor, alias, places)
            for tensor, alias in _tensor_arguments(func, args, kwargs)
            if (places := self._touched(tensor))
        ]
        for _, alias, places in touched:
            if alias is not None and alias.is_write:
                self._remember(places)
        result = func(*args, **kwargs)
        for tensor, alias, places in touched:
            for place in places:
                self._add(self.uses[place], func, tensor, alias, result)
        return result

    def add_format(
        self, tensor: Tensor, format: number_formats.Format, of_op: compute.Formats | str
    ) -> None:
        """Records that a parameter is rounded to a number format, perhaps as data."""
        place = _place(tensor)
        for touched in self._touched(tensor):
            if isinstance(of_op, str):
                self.uses[touched].as_data = self.uses[touched].as_data or of_op
            else:
                self.uses[touched].formats.add(replace(of_op, weights=format))
                self.uses[touched].is_read_elsewhere |= id(tensor) in self._held
            if touched == place:
                self.uses[touched].converted_to.add(format)
            else:
                self.uses[touched].read_by.setdefault(tensor.dtype, []).append(format.name)

    def add(self, kind: str, op: str, inputs: list[Tensor]) -> None:
        """Records ``op`` under a field of `Uses` for some inputs: ``"unrounded_by"``, ``"decides"``."""
        for tensor in inputs:
            for touched in self._touched(tensor):
                getattr(self.uses[touched], kind).append(op)

    def take_back_writes(self) -> None:
        """Restores every place that was written to."""
        with torch.no_grad(), torch_state.without_casts():
            for place, (tensor, before) in self._before.items():
                if has_changed(tensor, before):
                    self.uses[place].is_changed = True
                    tensor.copy_(before)
        self._before.clear()

    def _touched(self, tensor: Tensor) -> list[MemorySpan]:
        place = _place(tensor)
        if place is None:
            return []
        return [p for p in self._by_storage.get(place.storage, ()) if p.overlaps(place)]

    def _remember(self, places: Iterable[MemorySpan]) -> None:
        for place in places:
            if place not in self._before:
                tensor = self._tensors[place].detach()
                self._before[place] = (tensor, tensor.clone())

    def _add(self, uses: Uses, func: Any, tensor: Tensor, alias: Any, result: Any) -> None:
        name = str(getattr(func, "overloadpacket", func))  # "aten.embedding"
        if alias is not None and alias.is_write:
            uses.written_by.append(name)
        elif (alias is not None and _shares_storage(result, tensor)) or (
            getattr(func, "namespace", "") == "prim"
        ):
            pass  # a view, whose own uses will be seen; or it asks for the layout, not for values
        elif (
            getattr(func, "overloadpacket", None) in casts_of_aten()
            and tensor.dtype is torch.float32
            and result.dtype in LOW_DTYPES
        ):
            uses.converted_to.add(result.dtype)
        else:
            uses.read_by.setdefault(tensor.dtype, []).append(name)


def _tensor_arguments(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yields each tensor argument, with its aliasing according to the op's schema."""
    schema = getattr(func, "_schema", None)
    aliases = {a.name: a.alias_info for a in schema.arguments} if schema is not None else {}
    names = [*aliases, *[""] * len(args)]
    for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
        for tensor in _tensors_in(value):
            yield tensor, aliases.get(name)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in a value, including those inside tensors of a wrapper class."""
    if isinstance(value, Tensor):
        yield value
        if is_tensor_of_tensors(value):
            for attribute in value.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
                yield from _tensors_in(getattr(value, attribute))
    elif isinstance(value, SEQUENCES):
        for item in value:
            yield from _tensors_in(item)


def _shares_storage(result: Any, tensor: Tensor) -> bool:
    place = _place(tensor)
    others = map(_place, _tensors_in(result))
    return place is not None and any(o is not None and o.storage == place.storage for o in others)


def has_changed(tensor: Tensor, before: Tensor) -> bool:
    """Whether any bit differs."""
    if tensor.is_meta or tensor.is_quantized or isinstance(tensor, FakeTensor):
        return False
    as_bytes = [t.contiguous().view(-1).view(torch.uint8) for t in (tensor, before)]
    return not torch.equal(*as_bytes)


def watch_forward(
    model: nn.Module,
    found: Sequence[Slot],
    inputs: Any,
) -> UsesMode:
    """Runs one forward, and returns how it uses the tensors found; restores their values."""
    watch = UsesMode(found)
    try:
        formats = compute.watched(compute.EMULATION_WATCHERS, watch.add_format)
        unrounded = compute.watched_rounding(functools.partial(watch.add, "unrounded_by"))
        deciding = compute.watched(
            compute.DECIDING_WATCHERS, functools.partial(watch.add, "decides")
        )
        with torch.no_grad(), uncompiled(), formats, unrounded, deciding, watch:
            Steps("freeze", model).forward(inputs)
    except Exception as error:
        noted(
            error,
            f"hmpx.freeze: the forward of {printable(type(model).__name__)} raised it, so nothing was frozen; "
            "pass an example that the model takes",
        )
        raise
    finally:
        to_the_end(watch.take_back_writes)
    return watch


# --- which weights are stored low -------------------------------------------------------------------


@dataclass(frozen=True)
class Weight:
    """One parameter or buffer of a frozen model, under one of its names.

    Attributes:
        name: Its name in the model.
        kind: ``"parameter"`` or ``"buffer"``.
        dtype: Its dtype before.
        stored_dtype: Its dtype in the frozen model, or the number format of its codes.
        size_bytes: Its size before; 0 if it shares the memory of another weight in this list.
        stored_bytes: Its size in the frozen model.
        reason: Why it is stored this way.

    Example:
        >>> model = torch.nn.Linear(2, 3).eval()
        >>> with hmpx.convert(device_types={"cpu"}), hmpx.freeze(model, torch.ones(1, 2)) as frozen:
        ...     for weight in frozen.weights:
        ...         print(weight.name, weight.size_bytes, weight.stored_bytes)
        weight 24 12
        bias 12 6
    """

    name: str
    kind: str
    dtype: torch.dtype
    stored_dtype: LowType
    size_bytes: int
    stored_bytes: int
    reason: str

    @property
    def is_low(self) -> bool:
        """Whether freezing stored it in low precision."""
        return self.stored_dtype is not self.dtype


def table(name: str, weights: Sequence[Weight], *, is_undone: bool) -> str:
    """Returns the bytes before and after, and each weight's dtype and reason."""
    before = sum(weight.size_bytes for weight in weights)
    after = sum(weight.stored_bytes for weight in weights)
    low = sum(weight.is_low for weight in weights)
    lines = [
        f"{name}: {low} of {len(weights)} weights stored in low precision, "
        f"{before:,} -> {after:,} bytes{' (undone)' if is_undone else ''}"
    ]
    rows = [
        (
            weight.name,
            weight.kind,
            short_name(weight.dtype),
            short_name(weight.stored_dtype),
            f"{weight.stored_bytes:,}",
            weight.reason,
        )
        for weight in weights
    ]
    titles = ("name", "kind", "dtype", "stored", "bytes", "why")
    return lined([*lines, *ReportTable.of(titles, rows, numbers=["bytes"]).lines(sys.maxsize)])


def listed(names: Sequence[str], most: int = 3) -> str:
    """Returns the first few names, each once, and the number of others."""
    distinct = list(dict.fromkeys(names))
    more = len(distinct) - most
    return ", ".join(distinct[:most]) + (f" and {more} more" if more > 0 else "")


# --- decisions -----------------------------------------------------------------------------------


#: How weights are rounded to codes: the mode and overflow of `formats.quantize`.
Rounding: TypeAlias = tuple[str, str | None]


def one_rounding(in_force: session.Session, *, of_weights: bool = False) -> Rounding | None:
    """Returns how every use of a weight rounds it; None if uses differ: plain codes don't state their format.

    ``of_weights``: results and biases may be rounded otherwise.
    """
    policy, options = in_force.policy, in_force.options
    ways = {
        (format, said.rounding or options.rounding, said.overflow or options.overflow)
        for said in every_decision(policy)
        if number_formats.is_format(said.dtype)
        for format in (said.weights or said.dtype, *([] if of_weights else [said.dtype]))
    }
    if len(ways) != 1 or in_force.rules:
        return None
    ((_, mode, overflow),) = ways
    return None if mode == "stochastic" else (mode, overflow)


class Judged(NamedTuple):
    """How a weight is to be stored; ``packed`` are the bytes that will hold it, if any.

    ``formats`` are those of the ops in which it is a weight; None if it is more than that.
    """

    weight: Weight
    formats: compute.Formats | None
    packed: tuple[number_formats.Packing, Tensor] | None


def judged(
    found: Sequence[Slot],
    watch: UsesMode,
    replaced: set[MemorySpan],
    codes_for: session.Session | None,
) -> Iterator[Judged]:
    """Yields how each tensor is to be stored, and why; those at ``replaced`` places have left them since.

    ``codes_for``: the conversion in force, if weights are to be stored as codes.
    """
    rounding, is_plain = None, False
    if codes_for is not None:
        rounding = one_rounding(codes_for, of_weights=True)
        is_plain = one_rounding(codes_for) is not None
    firsts: dict[object, Slot] = {}
    packed: dict[MemorySpan, tuple[number_formats.Packing, Tensor] | None] = {}
    by_storage: dict[int, list[Slot]] = {}
    for f in found:
        if f.place is not None:
            by_storage.setdefault(f.place.storage, []).append(f)
    for f in found:
        key = f.place or id(f.tensor)
        first = firsts.setdefault(key, f)
        neighbours = by_storage[f.place.storage] if f.place is not None else []
        dtype, reason = _judgement(f, neighbours, watch, replaced)
        uses = Uses() if f.place is None else watch.uses[f.place]
        formats: set[compute.Formats] = set()
        if f.place is not None and number_formats.is_format(dtype):
            formats = uses.formats if not uses.as_data else formats
            is_free = not (uses.as_data or uses.is_read_elsewhere)
            if first is f and rounding and is_free:
                packed[f.place] = number_formats.packed(f.tensor.detach(), dtype, *rounding)
            is_coded = is_plain and isinstance(dtype, number_formats.CodedFormat)
            if uses.as_data or not (is_coded or packed.get(f.place)):
                if uses.as_data:
                    reason = f"used in {dtype.name} {uses.as_data}"
                elif rounding and not is_free:
                    reason += ", read elsewhere than as an attribute of its module"
                dtype, reason = f.tensor.dtype, f"{reason}, but not stored as codes"
        size_bytes = stored_bytes = 0
        bytes_ = packed.get(f.place) if f.place is not None else None
        if first is not f:
            reason = (
                f"{'is' if first.tensor is f.tensor else 'shares its memory with'} {first.name}"
            )
        elif not nn.parameter.is_lazy(f.tensor):
            size_bytes = f.tensor.numel() * f.tensor.element_size()
            stored_bytes = (
                bytes_[1].nbytes if bytes_ else f.tensor.numel() * _stored(dtype).itemsize
            )
        weight = Weight(f.name, f.kind, f.tensor.dtype, dtype, size_bytes, stored_bytes, reason)
        yield Judged(weight, next(iter(formats)) if len(formats) == 1 else None, bytes_)


def _judgement(
    f: Slot, neighbours: Sequence[Slot], watch: UsesMode, replaced: set[MemorySpan]
) -> tuple[LowType, str]:
    """Returns the type to store a tensor in, and why; ``neighbours`` are the tensors in its storage."""
    kept = f.tensor.dtype
    if f.place is None:
        return kept, f.fault
    if kept is not torch.float32:
        return kept, f"is {short_name(kept)}"
    if f.place in replaced:
        return kept, "was replaced while the example ran"
    for other in neighbours:
        if other.place is not None and other.place != f.place and f.place.overlaps(other.place):
            return kept, f"shares its storage with {other.name}"
    uses = watch.uses[f.place]
    if uses.written_by:
        return kept, f"written by {listed(uses.written_by)}"
    if uses.is_changed:
        return kept, "changed while the example ran"
    if uses.unrounded_by:
        return kept, f'used in fp32 by {listed(uses.unrounded_by)} under legalize="fast"'
    converted = [short_name(dtype) for dtype in sorted(uses.converted_to, key=str)]
    read = [f"in {short_name(dtype)} by {listed(by)}" for dtype, by in uses.read_by.items()]
    if read or len(converted) > 1:
        used = ", ".join([*(f"in {name}" for name in converted), *read])
        return kept, f"used {used}"
    if not converted:
        return kept, "not used by the example"
    if uses.decides:
        return kept, f"its type decides how {listed(uses.decides)} is computed"
    return next(iter(uses.converted_to)), f"used in {converted[0]} only"


def _stored(low: LowType) -> torch.dtype:
    if isinstance(low, torch.dtype):
        return low
    if isinstance(low, number_formats.CodedFormat):
        return number_formats.code_dtype(low.bits)
    return torch.float32
