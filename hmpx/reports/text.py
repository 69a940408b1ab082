"""A report as plain text of 80 columns: the verdict, fixes, and a table by op."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from .cells import clean, count, share, size, wrapped
from .fixes import Fix, fixes
from .tables import text_table

if TYPE_CHECKING:
    from .report import Report

#: How many fixes and groups are shown; the others are only counted.
MOST_FIXES: Final = 5
MOST_GROUPS: Final = 20


def verdict(report: Report) -> str:
    """Returns how much ran in low precision, and what casts wrote, in a sentence."""
    totals = report.totals
    if not totals.calls:
        if not report.about or "policy" in report.about:
            return "No calls were recorded."
        return "No calls were recorded; torch was not converted: hmpx.convert() comes first"
    parts = [
        (totals.low_flops, totals.flops, "FLOPs"),
        (totals.low_bytes, totals.bytes, "bytes"),
        (totals.low_calls, totals.calls, "calls"),
    ]
    shares = [f"{share(low, whole)} of {name}" for low, whole, name in parts if whole > 0]
    if len(shares) > 1:
        shares[-2:] = [f"{shares[-2]} and {shares[-1]}"]
    computed = _computed(report)
    casts = "1 cast" if totals.casts == 1 else f"{count(totals.casts)} casts"
    wrote = f"{casts} wrote {size(totals.cast_bytes)}" if totals.casts else "nothing was cast"
    return f"{', '.join(shares)} in low precision; {computed}{wrote}"


def _computed(report: Report) -> str:
    """Returns how much of what ran in low precision was computed natively, and how much in fp32."""
    rows = [row for row in report.rows if row.is_low]
    name, costs = "FLOPs", [row.flops for row in rows]
    if not any(costs):
        name, costs = "calls", [row.calls for row in rows]
    low = sum(costs)
    if not low:
        return ""
    native = sum(cost for row, cost in zip(rows, costs, strict=True) if not row.legalized)
    return (
        f"of these {name}, {share(native, low)} were computed natively, "
        f"{share(low - native, low)} in fp32 and rounded; "
    )


def ended_with(report: Report) -> str:
    """Returns what ended the run and where, on one line."""
    said = f"the run ended with: {clean(' '.join((report.error or '').split()))}"
    return f"{said}, at {clean(report.error_location)}" if report.error_location else said


def text(report: Report) -> str:
    """Returns the report as plain text."""
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    yield from verdict(report).split("; ")
    if report.error:
        yield from wrapped(ended_with(report))
    found = fixes(report.waste)
    if found:
        yield ""
        yield "fixes, those that save most first:"
        for fix in found[:MOST_FIXES]:
            yield from _fix_lines(fix)
        yield from more(len(found) - MOST_FIXES, "rec.waste()")
    if report.rows:
        groups = report.by_op()
        yield ""
        yield text_table(groups, groups.titles, MOST_GROUPS)
        yield from more(len(groups) - MOST_GROUPS, "rec.by_op()")


def _fix_lines(fix: Fix) -> Iterator[str]:
    yield from wrapped(fix.line, "  ")
    yield from wrapped(fix.reason, "      ")
    if fix.note:
        yield from wrapped(f"({fix.note})", "      ")


def more(number: int, call: str) -> Iterator[str]:
    """Yields the line that says how many were not shown, if any, and where all are."""
    if number > 0:
        yield f"... and {count(number)} more; {call} has all"
