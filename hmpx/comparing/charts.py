"""SVG charts of a comparison: errors along the model, and value ranges against the dtype's range."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Final

import torch

from .. import number_formats
from ..reports import clean, exponential, without_start
from ..tensors import LOW_DTYPES
from .measures import EXPONENTS, Limits, limits
from .rows import ComparedSite

_WIDTH: Final = 960

#: Most rows with a strip.
MOST_STRIPS: Final = 40


def limits_of(dtype: str) -> Limits | None:
    """Returns the range of a type by its name; None if it is unknown or has none."""
    known = getattr(torch, dtype, None)
    if isinstance(known, torch.dtype) and known in LOW_DTYPES:
        return limits(known)
    return limits(number_formats.get(dtype)) if dtype in number_formats.names() else None


def errors_by_depth(rows: Sequence[ComparedSite]) -> str:
    """Returns a chart of errors in call order, on a logarithmic axis: propagated, and the op's own.

    A line marks the unit roundoff of the low-precision type.
    """
    shown = sorted((row for row in rows if row.dtype), key=lambda row: row.order)
    points = [
        (kind, index, row, math.log10(value), value)
        for index, row in enumerate(shown)
        for kind, value in (("own", row.rel), ("passed", row.propagated_rel))
        if math.isfinite(value) and value > 0
    ]
    if not points:
        return ""
    types = {row.dtype: limits_of(row.dtype) for row in shown}
    roundoffs = {name: math.log10(2) * -each.bits for name, each in types.items() if each}
    exponents = [*(each[3] for each in points), *roundoffs.values()]
    low = math.floor(min(exponents))
    high = max(math.ceil(max(exponents)), low + 1)
    left, right, top, bottom = 60, 950, 10, 230

    def y(exponent: float) -> float:
        return bottom - (exponent - low) / (high - low) * (bottom - top)

    parts = []
    for power in range(low, high + 1, max(1, (high - low) // 8)):
        parts.append(_line("grid", left, y(power)))
        parts.append(_text(left - 6, y(power) + 4, f"1e{power}", "end"))
    for name, exponent in roundoffs.items():
        parts.append(_line("unit", left, y(exponent)))
        parts.append(_text(_WIDTH - 4, y(exponent) - 4, f"unit roundoff of {name}", "end"))
    for kind, index, row, exponent, value in points:
        x = left + (index + 0.5) * (right - left) / len(shown)
        title = f"{clean(row.op)} {clean(row.module)}: {exponential(value)}"
        parts.append(
            f'<circle class="{kind}" cx="{x:.1f}" cy="{y(exponent):.1f}" r="3">{_title(title)}</circle>'
        )
    parts += [_text(left, bottom + 22, "first call"), _text(_WIDTH - 4, bottom + 22, "last", "end")]
    return _svg(bottom + 30, "errors in the order of calls", parts)


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
    step = (_WIDTH - left - 10) / (last - first + 1)

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
                said = _title(f"2^{exponent}: {counted}")
                parts.append(_rect("values", x(exponent), step, top + 4, height - 10, shade, said))
        name = without_start(clean(f"{row.op} {row.module}"), 44)
        parts.append(_text(left - 8, top + 11, name, "end"))
    bottom = len(shown) * height + 16
    for exponent in range(first - first % 8 + 8, last + 1, 8):
        parts.append(_text(x(exponent), bottom, f"2^{exponent}", "middle"))
    return _svg(bottom + 6, "ranges of results", parts)


def _line(kind: str, left: float, y: float) -> str:
    return f'<line class="{kind}" x1="{left}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _title(text: str) -> str:
    return f"<title>{html.escape(text)}</title>"


def _rect(  # noqa: PLR0917
    kind: str, x: float, width: float, y: float, height: float, shade: float = 1.0, inside: str = ""
) -> str:
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{max(0.0, width):.1f}" '
        f'height="{height}" opacity="{shade:.2f}">{inside}</rect>'
    )


def _svg(height: int, label: str, parts: Iterable[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{label}">{"".join(parts)}</svg>'
    )
