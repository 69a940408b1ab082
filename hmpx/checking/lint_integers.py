"""The rule about whole numbers, such as positions, that a low type does not hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from ..comparing import Origins
from ..tensors import LOW_DTYPES, short_name, tensors_in
from .findings import Finding
from .lint_trace import CONVERTING, DIFFERENCES, SAMPLE, LintedCall, Trace

#: Values read to see whether it is worth while to read more.
_FEW: Final = 64

#: No position or counter is greater; masks are.
_MOST_COUNTED: Final = 2.0**40

#: Ops that compute with integers and low tensors; others take integers as indices.
_ARITHMETIC: Final = CONVERTING | DIFFERENCES | {"mul", "rmul", "imul", "truediv", "div", "pow"}

KEEP: Final = "keep them in float32"

#: The evidence, the effect, and that of the remedy, if it was tried.
Found = tuple[str, float, float | None]


def rounded_integers(seen: LintedCall, trace: Trace, origins: Origins) -> Iterator[Finding]:
    """HP102: integers that a cast to a low type changes."""
    low = next((each.dtype for each in seen.outputs if each.dtype in LOW_DTYPES), seen.low)
    if low is None:
        return
    for each in tensors_in([*seen.args, *seen.kwargs.values()]):
        is_index = not each.is_floating_point() and seen.call.op not in _ARITHMETIC
        is_exact = each.dtype in (*LOW_DTYPES, torch.bool) or each.is_complex() or not each.dim()
        if not is_index and not is_exact and (found := rounded(each, low)):
            remedy = KEEP if seen.moves else f"{seen.line()} in the fp32 list"
            yield Finding("HP102", *seen.place, *found, remedy)
            return


def rounded(
    exact: Tensor, low: torch.dtype, found: Tensor | None = None
) -> tuple[str, float, float] | None:
    """Returns the evidence and the effects if the values are whole numbers, and ``low``, or ``found``, has others."""
    values = whole_numbers(exact)
    if values is None or not values.numel():
        return None
    given = values.to(low)
    if found is not None:
        is_counted = exact.detach().reshape(-1)[:SAMPLE].double().abs() < _MOST_COUNTED
        given = found.reshape(-1)[:SAMPLE][is_counted]
    changed, remedied = (
        (each.double() != values).double().mean().item() for each in (given, values.float())
    )
    if not changed:
        return None
    evidence = (
        f"{changed:.0%} of the whole numbers up to {values.abs().max().item():,.0f} change in "
        f"{short_name(low)}, which counts to {most_counted(low):,}"
    )
    return evidence, changed, remedied


def merged(exact: Tensor, found: Tensor) -> tuple[str, float, float] | None:
    """Likewise if different numbers are equal in a low type."""
    count, low, wide = (len(torch.unique(each)) for each in (exact, found, exact.float()))
    evidence = f"{count:,} numbers are {low:,} different ones in {short_name(found.dtype)}"
    return (evidence, 1 - low / count, 1 - wide / count) if low < count else None


def whole_numbers(tensor: Tensor) -> Tensor | None:
    """Returns the values in float64, without masks; None unless all are whole numbers."""
    values = tensor.detach().reshape(-1)
    few = values[:_FEW].double().tolist()  # they tell most tensors
    if any(each % 1 for each in few if abs(each) < _MOST_COUNTED):
        return None
    sample = values[:SAMPLE].double()
    sample = sample[sample.abs() < _MOST_COUNTED]
    return sample if (sample == sample.round()).all() else None


def most_counted(low: torch.dtype) -> int:
    """Returns the number to which a dtype counts."""
    return round(2 / torch.finfo(low).eps)
