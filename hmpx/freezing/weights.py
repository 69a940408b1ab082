"""Decides which weights to store low, by their uses in the example, and reports a row for each."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

from .. import number_formats, session
from ..errors import lined
from ..policy import LowType
from ..reports import Table
from ..tensors import short_name
from .uses import Place, Slot, Watch


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
    return lined([*lines, *Table.of(titles, rows, numbers=["bytes"]).lines(sys.maxsize)])


def listed(names: Sequence[str], most: int = 3) -> str:
    """Returns the first few names, each once, and the number of others."""
    distinct = list(dict.fromkeys(names))
    more = len(distinct) - most
    return ", ".join(distinct[:most]) + (f" and {more} more" if more > 0 else "")


# --- decisions -----------------------------------------------------------------------------------


#: How weights are rounded to codes: the mode and overflow of `formats.quantize`.
Rounding: TypeAlias = tuple[str, str | None]


def one_rounding(in_force: session.Session) -> Rounding | None:
    """Returns how every use of a weight rounds it; None if uses differ: codes don't state their format."""
    policy, options = in_force.policy, in_force.options
    decided = [policy.decisions, *[section.decisions for section in policy.sections]]
    decisions = [decision for each in decided for decision in each.values()]
    ways = {
        (format, said.rounding or options.rounding, said.overflow or options.overflow)
        for said in decisions
        if number_formats.is_format(said.dtype)
        for format in (said.dtype, said.weights or said.dtype)
    }
    if len(ways) != 1 or in_force.rules:
        return None
    ((_, mode, overflow),) = ways
    return None if mode == "stochastic" else (mode, overflow)


def judged(
    found: Sequence[Slot], watch: Watch, replaced: set[Place], as_codes: bool
) -> Iterator[Weight]:
    """Yields how each tensor is to be stored, and why; those at ``replaced`` places have left them since."""
    firsts: dict[object, Slot] = {}
    by_storage: dict[int, list[Slot]] = {}
    for f in found:
        if f.place is not None:
            by_storage.setdefault(f.place.storage, []).append(f)
    for f in found:
        key = f.place or id(f.tensor)
        first = firsts.setdefault(key, f)
        neighbours = by_storage[f.place.storage] if f.place is not None else []
        dtype, reason = _judgement(f, neighbours, watch, replaced)
        as_data = "" if f.place is None else watch.uses[f.place].as_data
        is_coded = as_codes and isinstance(dtype, number_formats.CodedFormat)
        if number_formats.is_format(dtype) and (as_data or not is_coded):
            reason = f"used in {dtype.name} {as_data}" if as_data else reason
            dtype, reason = f.tensor.dtype, f"{reason}, but not stored as codes"
        size_bytes = stored_bytes = 0
        if first is not f:
            reason = (
                f"{'is' if first.tensor is f.tensor else 'shares its memory with'} {first.name}"
            )
        elif not nn.parameter.is_lazy(f.tensor):
            size_bytes = f.tensor.numel() * f.tensor.element_size()
            stored_bytes = f.tensor.numel() * _stored(dtype).itemsize
        yield Weight(f.name, f.kind, f.tensor.dtype, dtype, size_bytes, stored_bytes, reason)


def _judgement(
    f: Slot, neighbours: Sequence[Slot], watch: Watch, replaced: set[Place]
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
