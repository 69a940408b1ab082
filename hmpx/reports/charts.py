"""SVG charts: errors along a model, for `compare` and `diff_runs`; the parts of others."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from .cells import exponential
from .pages import section

#: The width of a chart, in pixels.
CHART_WIDTH: Final = 960

#: The kind of a point, its place among the calls, its value, and what it is of.
Point = tuple[str, int, float, str]


def chart_section(name: str, heading: str, keys: Mapping[str, str], picture: str) -> str:
    """Returns a section of a page with a chart and its legend of kind -> meaning; ``""`` without a chart."""
    if not picture:
        return ""
    legend = " ".join(f'<span class="key {kind}">{said}</span>' for kind, said in keys.items())
    chart = f'<div class="scroll chart">{picture}</div>'
    return section(name, heading, f'<p class="legend">{legend}</p>', chart)


def by_depth(
    points: Sequence[Point], count: int, roundoffs: Mapping[str, float], label: str
) -> str:
    """Returns a chart of relative errors in the order of ``count`` calls, on a logarithmic axis.

    Args:
        points: Points; those without a positive, finite value are left out.
        count: Number of calls.
        roundoffs: Type -> its unit roundoff, marked by a line.
        label: What the chart shows.
    """
    shown = [each for each in points if math.isfinite(each[2]) and each[2] > 0]
    if not shown:
        return ""
    exponents = [math.log10(each) for each in (*(each[2] for each in shown), *roundoffs.values())]
    low = math.floor(min(exponents))
    high = max(math.ceil(max(exponents)), low + 1)
    left, right, top, bottom = 60, 950, 10, 230

    def y(value: float) -> float:
        return bottom - (math.log10(value) - low) / (high - low) * (bottom - top)

    parts = []
    for power in range(low, high + 1, max(1, (high - low) // 8)):
        parts.append(_line("grid", left, y(10.0**power)))
        parts.append(svg_text(left - 6, y(10.0**power) + 4, f"1e{power}", "end"))
    for name, roundoff in roundoffs.items():
        parts.append(_line("unit", left, y(roundoff)))
        parts.append(svg_text(CHART_WIDTH - 4, y(roundoff) - 4, f"unit roundoff of {name}", "end"))
    for kind, index, value, said in shown:
        x = left + (index + 0.5) * (right - left) / count
        inside = svg_title(f"{said}: {exponential(value)}")
        parts.append(
            f'<circle class="{kind}" cx="{x:.1f}" cy="{y(value):.1f}" r="3">{inside}</circle>'
        )
    parts.append(svg_text(left, bottom + 22, "first call"))
    parts.append(svg_text(CHART_WIDTH - 4, bottom + 22, "last", "end"))
    return svg_chart(bottom + 30, label, parts)


def _line(kind: str, left: float, y: float) -> str:
    """Returns a horizontal line to the right end."""
    return f'<line class="{kind}" x1="{left}" x2="{CHART_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'


def svg_text(x: float, y: float, said: str, anchor: str = "start") -> str:
    """Returns text at a point."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(said)}</text>'


def svg_title(said: str) -> str:
    """Returns the text that is shown over an element."""
    return f"<title>{html.escape(said)}</title>"


def svg_chart(height: int, label: str, parts: Iterable[str]) -> str:
    """Returns a chart of its parts."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {CHART_WIDTH} {height}" role="img" '
        f'aria-label="{label}">{"".join(parts)}</svg>'
    )
