"""What casts could be done without, and what to do about each kind: for `Waste` of a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import torch

from ..reports import Waste
from .entries import Counted, Place, place_of
from .traces import Found


def waste(found: Mapping[Found, list[int]], counted: Counted) -> Iterator[Waste]:
    """Yields the casts to do without: those that traces have found, and those of unused results."""
    for each, (times, count) in list(found.items()):
        fix, note = _FIXES[each.kind](each)
        yield Waste(each.kind, each.what, each.module, each.location, times, count, fix, note)
    yield from _unused_results(counted)


def _unused_results(counted: Counted) -> Iterator[Waste]:
    """Yields calls that were recorded by autograd and got no gradient, where others did."""
    used = {id(entry) for entry, _ in counted.gradients}
    used_places = {place_of(entry) for entry, _ in counted.gradients if entry.is_folded}
    was_folded = any(sums.backward for sums in counted.places.values())
    if not (used or was_folded or any(entry.backward for entry in counted.entries)):
        return
    for entry in counted.entries:
        call = entry.call
        if call.cast_bytes and entry.recorded and not entry.backward and id(entry) not in used:
            yield _unused(place_of(entry), entry.recorded, entry.recorded * call.cast_bytes)
    for place, sums in counted.places.items():
        if sums.bytes and not sums.backward and place not in used_places:
            yield _unused(place, sums.recorded, sums.bytes)


def _unused(place: Place, times: int, count: int) -> Waste:
    return Waste(
        "unused result",
        *place,
        times,
        count,
        "with torch.no_grad():",
        "no gradient came back to it, so nothing that was differentiated depends on it",
    )


# --- fixes ---------------------------------------------------------------------------------------

#: A line to copy, and what that costs.
Fix = tuple[str, str]


def _of_round_trip(found: Found) -> Fix:
    costs = "less accurate: compare before you keep it"
    if found.subject.startswith("-"):
        costs = "it then computes in the type of its input"
    return f"bf16.txt: {found.subject}", costs


def _of_parameter(found: Found) -> Fix:
    if found.learns:
        return "hmpx.convert(reuse_casts=True)", "within one call of the outermost module"
    return "hmpx.freeze(model)", "for inference: stores the weight as it is used"


def _of_tensor(found: Found) -> Fix:
    method = _METHODS.get(found.dtype, "to(...)")
    return f"x = x.{method}", "once, before it is used"


_METHODS: Final = {
    torch.bfloat16: "bfloat16()",
    torch.float16: "half()",
    torch.float32: "float()",
}


def _of_kept_weight(found: Found) -> Fix:
    return (
        "hmpx.convert(keep_weight_casts=False)",
        "the backward casts them again, to the same bits",
    )


#: Kind of `Found` -> its fix.
_FIXES: Final[dict[str, Callable[[Found], Fix]]] = {
    "round trip": _of_round_trip,
    "parameter cast again": _of_parameter,
    "tensor cast again": _of_tensor,
    "weight casts kept": _of_kept_weight,
}
