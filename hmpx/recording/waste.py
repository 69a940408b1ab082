"""What casts could be done without, and what to do about each kind: for `Waste` of a report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import torch

from ..reports import Waste
from .recorder import Entry
from .traces import Found


def waste(found: Mapping[Found, list[int]], entries: Iterable[Entry]) -> Iterator[Waste]:
    """Yields the casts to do without: those that traces have found, and those of unused results."""
    for each, (times, count) in list(found.items()):
        call = each.entry.call
        fix, note = _FIXES[each.kind](each)
        yield Waste(each.kind, each.what, call.module, call.location, times, count, fix, note)
    yield from _unused_results(list(entries))


def _unused_results(entries: list[Entry]) -> Iterator[Waste]:
    """Yields calls that were recorded by autograd and got no gradient, where others did."""
    if not any(entry.backward for entry in entries):
        return
    for entry in entries:
        call = entry.call
        if call.cast_bytes and entry.recorded and not entry.backward:
            yield Waste(
                "unused result",
                call.op,
                call.module,
                call.location,
                entry.recorded,
                entry.recorded * call.cast_bytes,
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
    if any(shape.learns for shape in found.entry.inputs):
        return "hmpx.convert(reuse_casts=True)", "within one call of the outermost module"
    return "hmpx.freeze(model)", "for inference: stores the weight as it is used"


def _of_tensor(found: Found) -> Fix:
    method = _METHODS.get(found.entry.call.cast_dtypes[0], "to(...)")
    return f"x = x.{method}", "once, before it is used"


_METHODS: Final = {
    torch.bfloat16: "bfloat16()",
    torch.float16: "half()",
    torch.float32: "float()",
}


def _of_kept_weight(found: Found) -> Fix:
    return (
        "x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
        "computes the block again; for inference hmpx.freeze(model)",
    )


#: Kind of `Found` -> its fix.
_FIXES: Final[dict[str, Callable[[Found], Fix]]] = {
    "round trip": _of_round_trip,
    "parameter cast again": _of_parameter,
    "tensor cast again": _of_tensor,
    "weight casts kept": _of_kept_weight,
}
