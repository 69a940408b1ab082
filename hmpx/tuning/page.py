"""A result as one HTML page without a network or scripts, and as a part of a notebook."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from . import text, writing
from .candidates import Evaluation

if TYPE_CHECKING:
    from .result import Tuned

_STYLE: Final = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 64rem; padding: 0 1rem;
  color-scheme: light dark; }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem; }
th, td { text-align: left; padding: 0.2rem 0.9rem 0.2rem 0; border-bottom: 1px solid #8884;
  vertical-align: top; }
pre { background: #8881; padding: 0.7rem; overflow-x: auto; }
svg { max-width: 100%; height: auto; }
.passes { fill: #2a9d5c; } .fails { fill: #d1495b; }
text { fill: currentColor; font: 11px system-ui, sans-serif; }
"""

#: Size of the plot, and its margins on the left and below, in pixels.
_WIDTH, _HEIGHT, _LEFT, _BELOW = 720, 220, 64, 24


def page(tuned: Tuned) -> str:
    """Returns the page."""
    files = "".join(
        f"<details><summary>{html.escape(name)}</summary><pre>{html.escape(content)}</pre></details>"
        for name, content in writing.files(tuned).items()
        if name != "widest.txt"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>hmpx tune</title><style>{_STYLE}</style></head><body>"
        f"<h1>What to keep in fp32</h1>{_verdict(tuned)}{_kept(tuned)}"
        f"<h2>Lists</h2>{files}"
        f"<h2>The search</h2>{_plot(tuned)}{_table(text.PATH_TITLES, text.path_rows(tuned))}"
        f"<h2>Candidates by effect</h2>{_table(_CANDIDATE_TITLES, _candidates(tuned))}"
        "</body></html>\n"
    )


def notebook_part(tuned: Tuned) -> str:
    """Returns the verdict and what is kept as HTML without scripts or styles."""
    return f"<div>{_verdict(tuned)}{_kept(tuned)}</div>"


def _verdict(tuned: Tuned) -> str:
    lines = map(html.escape, text.verdict(tuned).splitlines())
    return f"<p>{'<br>'.join(lines)}</p>"


def _kept(tuned: Tuned) -> str:
    rows = text.kept_rows(tuned)
    return _table(text.KEPT_TITLES, rows) if rows else ""


_CANDIDATE_TITLES: Final = ("candidate", "effect", "type", "FLOPs", "bytes")


def _candidates(tuned: Tuned) -> list[tuple[str, ...]]:
    types = tuned.types
    ordered = sorted(
        tuned.candidates, key=lambda each: (not each.is_hard, -(each.score or 0.0), each.name)
    )
    return [
        (
            each.name,
            text.effect(each),
            types[each.name],
            f"{each.flops:,}",
            f"{each.bytes:,}",
        )
        for each in ordered
    ]


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{html.escape(title)}</th>' for title in titles)
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _plot(tuned: Tuned) -> str:
    """Returns the errors of the search on a logarithmic scale, with the tolerance as a line."""
    finite = [each.error for each in tuned.path if math.isfinite(each.error) and each.error > 0]
    levels = [math.log10(value) for value in [*finite, tuned.tolerance]]
    low, high = math.floor(min(levels)), math.ceil(max(levels)) + 1

    def y(error: float) -> float:
        level = high if not math.isfinite(error) else math.log10(error) if error > 0 else low
        return 10 + (high - level) / (high - low) * (_HEIGHT - _BELOW - 20)

    step = (_WIDTH - _LEFT - 20) / max(1, len(tuned.path))
    dots = "".join(
        f'<circle class="{"passes" if each.passed else "fails"}" r="4" '
        f'cx="{_LEFT + (i + 0.5) * step:.1f}" cy="{y(each.error):.1f}"><title>{_dot(tuned, each)}</title></circle>'
        for i, each in enumerate(tuned.path)
    )
    grid = "".join(
        f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y(10.0**n):.1f}" y2="{y(10.0**n):.1f}" stroke="#8884"/>'
        f'<text x="{_LEFT - 8}" y="{y(10.0**n) + 4:.1f}" text-anchor="end">1e{n}</text>'
        for n in range(low, high)
    )
    line = y(tuned.tolerance)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        f'aria-label="error of each evaluation">{grid}'
        f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{line:.1f}" y2="{line:.1f}" stroke="#d1495b" '
        f'stroke-dasharray="4 3"/><text x="{_WIDTH - 4}" y="{line - 4:.1f}" text-anchor="end">'
        f"tolerance</text>{dots}"
        f'<text x="{_LEFT}" y="{_HEIGHT - 4}">evaluations, in their order</text></svg>'
    )


def _dot(tuned: Tuned, evaluation: Evaluation) -> str:
    return html.escape(f"{text.names(evaluation.kept)}: {text.error_text(tuned, evaluation.error)}")
