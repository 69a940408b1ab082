"""SVG charts of a comparison: errors along the model, and value ranges against the dtype's range."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch

from .. import number_formats
from ..reports import CHART_WIDTH, by_depth, clean, svg_chart, svg_text, svg_title, without_start
from ..tensors import LOW_DTYPES
from .measures import EXPONENTS, Limits, limits
from .rows import ComparedSite

#: Most rows with a strip.
MOST_STRIPS: Final = 40


def limits_of(dtype: str) -> Limits | None:
    """Returns the range of a type by its name; None if it is unknown or has none."""
    known = getattr(torch, dtype, None)
    if isinstance(known, torch.dtype) and known in LOW_DTYPES:
        return limits(known)
    return limits(number_formats.get(dtype)) if dtype in number_formats.names() else None


def errors_by_depth(rows: Sequence[ComparedSite]) -> str:
    """Returns a chart of errors in call order: propagated, and the op's own."""
    shown = sorted((row for row in rows if row.dtype), key=lambda row: row.order)
    points = [
        (kind, index, value, f"{clean(row.op)} {clean(row.module)}")
        for index, row in enumerate(shown)
        for kind, value in (("own", row.rel), ("passed", row.propagated_rel))
    ]
    types = {row.dtype: limits_of(row.dtype) for row in shown}
    roundoffs = {name: 2.0**-each.bits for name, each in types.items() if each}
    return by_depth(points, len(shown), roundoffs, "errors in the order of calls")


def ranges(rows: Sequence[ComparedSite]) -> str:
    """Returns a strip for each of the first rows: how many values have each binary exponent.

    The range of the low-precision type is in the background: normal and subnormal numbers.
    """
    shown = [row for row in rows if row.dtype and any(row.exponents)][:MOST_STRIPS]
    if not shown:
        return ""
    used = [EXPONENTS[i] for row in shown for i, each in enumerate(row.exponents) if each]
    first, last = max(EXPONENTS.start, min(used) - 4), min(EXPONENTS.stop - 1, max(used) + 4)
    left, height = 280, 18
    step = (CHART_WIDTH - left - 10) / (last - first + 1)

    def x(exponent: float) -> float:
        return left + (min(max(exponent, first), last + 1) - first) * step

    parts = []
    for place, row in enumerate(shown):
        top = place * height + 2
        within = limits_of(row.dtype)
        if within is not None:
            normal = math.log2(within.smallest_normal)
            most = math.floor(math.log2(within.max)) + 1
            for kind, start, end in (
                ("subnormal", normal - within.bits + 1, normal),
                ("normal", normal, most),
            ):
                parts.append(_rect(kind, x(start), x(end) - x(start), top, height - 2))
        for exponent, counted in zip(EXPONENTS, row.exponents, strict=False):
            if counted:
                shade = 0.25 + 0.75 * math.log1p(counted) / math.log1p(max(row.exponents))
                said = svg_title(f"2^{exponent}: {counted}")
                parts.append(_rect("values", x(exponent), step, top + 4, height - 10, shade, said))
        name = without_start(clean(f"{row.op} {row.module}"), 44)
        parts.append(svg_text(left - 8, top + 11, name, "end"))
    bottom = len(shown) * height + 16
    for exponent in range(first - first % 8 + 8, last + 1, 8):
        parts.append(svg_text(x(exponent), bottom, f"2^{exponent}", "middle"))
    return svg_chart(bottom + 6, "ranges of results", parts)


def _rect(  # noqa: PLR0917
    kind: str, x: float, width: float, y: float, height: float, shade: float = 1.0, inside: str = ""
) -> str:
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{max(0.0, width):.1f}" '
        f'height="{height}" opacity="{shade:.2f}">{inside}</rect>'
    )
