"""SVG charts of a comparison: errors along the model, and value ranges against the dtype's range."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Final

import torch

from ..number_formats import get, names
from ..reports import clean, exponential
from ..tensors import LOW_DTYPES
from .measures import EXPONENTS, Limits, limits
from .rows import ComparedSite

_WIDTH: Final = 960
_HEIGHT: Final = 260
_LEFT: Final = 60
_BOTTOM: Final = 30

#: Most rows with a strip.
MOST_STRIPS: Final = 40
_STRIP: Final = 18


def limits_of(dtype: str) -> Limits | None:
    """Returns the range of a type by its name; None if it is unknown or has none."""
    known = getattr(torch, dtype, None)
    if isinstance(known, torch.dtype) and known in LOW_DTYPES:
        return limits(known)
    return limits(get(dtype)) if dtype in names() else None


def errors_by_depth(rows: Sequence[ComparedSite]) -> str:
    """Returns a chart of errors in call order, on a logarithmic axis: propagated, and the op's own.

    A line marks the unit roundoff of the low-precision type.
    """
    shown = sorted((row for row in rows if row.dtype), key=lambda row: row.order)
    values = [each for row in shown for each in (row.rel, row.propagated_rel) if _is_drawn(each)]
    if not values:
        return ""
    types = {row.dtype: limits_of(row.dtype) for row in shown}
    roundoffs = {name: 2.0**-each.bits for name, each in types.items() if each is not None}
    exponents = [math.log10(each) for each in [*values, *roundoffs.values()]]
    low, high = math.floor(min(exponents)), math.ceil(max(exponents)) or 1
    high = max(high, low + 1)

    def y(value: float) -> float:
        part = (math.log10(value) - low) / (high - low)
        return _HEIGHT - _BOTTOM - part * (_HEIGHT - _BOTTOM - 10)

    def x(index: int) -> float:
        return _LEFT + (index + 0.5) * (_WIDTH - _LEFT - 10) / len(shown)

    parts = []
    for exponent in range(low, high + 1, max(1, (high - low) // 8)):
        at = y(10.0**exponent)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(
            f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">1e{exponent}</text>'
        )
    for name, roundoff in roundoffs.items():
        at = y(roundoff)
        parts.append(f'<line class="unit" x1="{_LEFT}" x2="{_WIDTH}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(
            f'<text x="{_WIDTH - 4}" y="{at - 4:.1f}" text-anchor="end">'
            f"unit roundoff of {html.escape(name)}</text>"
        )
    for index, row in enumerate(shown):
        for kind, value in (("own", row.rel), ("passed", row.propagated_rel)):
            if _is_drawn(value):
                title = html.escape(f"{clean(row.op)} {clean(row.module)}: {exponential(value)}")
                parts.append(
                    f'<circle class="{kind}" cx="{x(index):.1f}" cy="{y(value):.1f}" r="3">'
                    f"<title>{title}</title></circle>"
                )
    parts.append(
        f'<text x="{_LEFT}" y="{_HEIGHT - 8}">first call</text>'
        f'<text x="{_WIDTH - 4}" y="{_HEIGHT - 8}" text-anchor="end">last</text>'
    )
    return _svg(_WIDTH, _HEIGHT, "errors in the order of calls", parts)


def _is_drawn(value: float) -> bool:
    return math.isfinite(value) and value > 0


def ranges(rows: Sequence[ComparedSite]) -> str:
    """Returns a strip for each of the first rows: how many values have each binary exponent.

    The range of the low-precision type is in the background: normal and subnormal numbers.
    """
    shown = [row for row in rows if row.dtype and any(row.exponents)][:MOST_STRIPS]
    if not shown:
        return ""
    used = [EXPONENTS[i] for row in shown for i, each in enumerate(row.exponents) if each]
    first, last = max(EXPONENTS.start, min(used) - 4), min(EXPONENTS.stop - 1, max(used) + 4)
    left = 280
    step = (_WIDTH - left - 10) / (last - first + 1)

    def x(exponent: float) -> float:
        return left + (min(max(exponent, first), last + 1) - first) * step

    parts = []
    for place, row in enumerate(shown):
        top = place * _STRIP + 2
        within = limits_of(row.dtype)
        if within is not None:
            normal = math.log2(within.smallest_normal)
            most = math.floor(math.log2(within.max)) + 1
            parts.append(_rect("subnormal", x(normal - within.bits + 1), x(normal), top))
            parts.append(_rect("normal", x(normal), x(most), top))
        most_values = max(row.exponents)
        for index, counted in enumerate(row.exponents):
            exponent = EXPONENTS[index]
            if counted and first <= exponent <= last:
                shade = 0.25 + 0.75 * math.log1p(counted) / math.log1p(most_values)
                parts.append(
                    f'<rect class="values" x="{x(exponent):.1f}" y="{top + 4}" width="{step:.1f}" '
                    f'height="{_STRIP - 10}" opacity="{shade:.2f}">'
                    f"<title>2^{exponent}: {counted}</title></rect>"
                )
        name = clean(f"{row.op} {row.module}")
        name = name if len(name) <= 44 else f"{name[:14]}..{name[-28:]}"
        parts.append(
            f'<text x="{left - 8}" y="{top + 11}" text-anchor="end">{html.escape(name)}</text>'
        )
    bottom = len(shown) * _STRIP + 16
    for exponent in range(first - first % 8 + 8, last + 1, 8):
        parts.append(
            f'<text x="{x(exponent):.1f}" y="{bottom}" text-anchor="middle">2^{exponent}</text>'
        )
    return _svg(_WIDTH, bottom + 6, "ranges of results", parts)


def _rect(kind: str, left: float, right: float, top: float) -> str:
    width = max(0.0, right - left)
    return (
        f'<rect class="{kind}" x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_STRIP - 2}"/>'
    )


def _svg(width: int, height: int, label: str, parts: Iterable[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{label}">{"".join(parts)}</svg>'
    )
