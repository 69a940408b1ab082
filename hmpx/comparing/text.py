"""A comparison as plain text of 80 columns: the verdict, and the rows of largest effect."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from ..reports import (
    Column,
    clean,
    column_rows,
    count,
    located,
    share,
    short_dtype,
    without_end,
    without_start,
    wrapped,
)
from .rows import ComparedGradient, ComparedSite

if TYPE_CHECKING:
    from .comparison import Comparison

#: How many rows, gradients and outputs are shown.
MOST_ROWS: Final = 15
MOST_GRADIENTS: Final = 3
MOST_NOTES: Final = 5


def number(value: float) -> str:
    """Returns ``"1.8e-03"``, ``"0"``, ``"inf"``; ``"-"`` of NaN."""
    if math.isnan(value):
        return "-"
    return "0" if value == 0 else f"{value:.1e}" if math.isfinite(value) else f"{value}"


def verdict(comparison: Comparison) -> str:
    """Returns what low precision does to the result, and which op does most of it."""
    rows = comparison.rows
    if not rows:
        return "No calls were compared."
    low = [row for row in rows if row.dtype]
    parts = []
    if not math.isnan(comparison.loss):
        parts.append(
            f"loss {comparison.loss:.6g} in fp32, {comparison.low_loss:.6g} in low precision"
        )
    if not math.isnan(comparison.output_rel):
        parts.append(f"outputs differ by {number(comparison.output_rel)}, relative to their norm")
    parts += map(clean, comparison.output_notes[:MOST_NOTES])
    if len(comparison.output_notes) > MOST_NOTES:
        parts.append(f"and {count(len(comparison.output_notes) - MOST_NOTES)} outputs more")
    if not low:
        return "; ".join([*parts, "no op runs in low precision"])
    worst = low[0]
    if math.isnan(worst.effect):
        parts.append("no gradient arrives at any op, so that effects are unknown")
    elif worst.effect == 0:
        parts.append("no op has an effect")
    else:
        where = f" in {clean(worst.module)}" if worst.module else ""
        parts.append(f"largest effect: {clean(worst.op)}{where} at {located(worst.site)}")
    return "; ".join(parts)


def remarks(row: ComparedSite) -> str:
    """Returns what is wrong with a row: values lost, too large, rounded to zero; calls without an effect."""
    if row.lost:
        return f"{count(row.lost)} not finite"
    if not row.fits:
        return "beyond the range"
    if row.underflow >= 0.01:
        return f"{share(row.underflow, 1)} became 0"
    if row.flips > 0:
        return f"{share(row.flips, 1)} differ"
    if 0 < row.unseen < row.calls:
        return f"no gradient: {count(row.unseen)}"
    return ""


def text(comparison: Comparison) -> str:
    """Returns the comparison as plain text."""
    return "\n".join(_lines(comparison))


def _lines(comparison: Comparison) -> Iterator[str]:
    for sentence in verdict(comparison).split("; "):
        yield from wrapped(sentence)
    if not math.isnan(comparison.compiled_rel):
        yield f"compiled, they differ by {number(comparison.compiled_rel)} more"
    if comparison.unmatched:
        yield from wrapped(
            f"{count(comparison.unmatched)} calls were made in fp32 only: what the model calls "
            "depends on values"
        )
    if comparison.backward_error:
        yield from wrapped(f"the backward failed: {clean(comparison.backward_error)}")
    low = [row for row in comparison.rows if row.dtype]
    if low:
        yield ""
        yield table(low[:MOST_ROWS])
        if len(low) > MOST_ROWS:
            yield f"... and {count(len(low) - MOST_ROWS)} more; .rows has all"
    gradients = comparison.gradients[:MOST_GRADIENTS]
    if gradients:
        yield ""
        yield from _gradient_lines(gradients, len(comparison.gradients))


def table(rows: Sequence[ComparedSite]) -> str:
    """Returns a table of rows, no wider than 80 columns."""
    columns = [
        Column("op", tuple([clean(row.op) for row in rows]), is_number=False),
        Column(
            "module",
            tuple([clean(row.module) or "-" for row in rows]),
            is_number=False,
            cut=without_start,
        ),
        Column("in", tuple([short_dtype(row.dtype) or "fp32" for row in rows]), is_number=False),
        Column("calls", tuple([count(row.calls) for row in rows])),
        Column("effect", tuple([number(row.effect) for row in rows])),
        Column("error", tuple([number(row.rel) for row in rows])),
        Column("passed on", tuple([number(row.propagated_rel) for row in rows])),
        Column("largest", tuple([number(row.range.largest) for row in rows])),
    ]
    notes = tuple([remarks(row) for row in rows])
    if any(notes):
        columns.append(Column("", notes, is_number=False, cut=without_end))
    return "\n".join("".join(cells).rstrip() for cells in column_rows(columns))


def _gradient_lines(gradients: Sequence[ComparedGradient], total: int) -> Iterator[str]:
    yield f"gradients of {count(total)} parameters, those that differ most:"
    for each in gradients:
        said = (
            f"differs by {number(each.rel)}, cosine {each.cosine:.4f}"
            if each.is_finite
            else "is not finite in low precision"
        )
        yield from wrapped(f"{clean(each.name)} {said}", "  ")
