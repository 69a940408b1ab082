"""A comparison as one HTML page without a network, and as a part of a notebook."""

from __future__ import annotations

import html
import math
from typing import TYPE_CHECKING, Any, Final

from ..reports import clean, count, located, page_file, rendered, short_dtype
from .charts import errors_by_depth, ranges
from .rows import ComparedSite
from .text import number, remarks, verdict

if TYPE_CHECKING:
    from .comparison import Comparison

_TITLES: Final = (
    "op", "module", "line", "in", "decided by", "remark",
    "calls", "effect", "error", "passed on", "SQNR, dB", "ulp", "cosine", "largest error",
    "smallest", "largest",
)  # fmt: skip

#: How many of these, at the end, are numbers.
_NUMBERS: Final = 10


def page(comparison: Comparison) -> str:
    """Returns the page."""
    from markupsafe import Markup  # comes with jinja2, on which torch depends

    package = str(__package__)
    style = page_file("hmpx.reports", "report.css") + page_file(package, "compare.css")
    values = {
        "verdict": verdict(comparison).split("; "),
        "target": "outputs, relative to their norm" if math.isnan(comparison.loss) else "loss",
        "depth": Markup(errors_by_depth(comparison.rows)),  # escaped there
        "ranges": Markup(ranges(comparison.rows)),
        "has_gradients": bool(comparison.gradients),
    }
    template, script = page_file(package, "compare.html"), page_file(package, "compare.js")
    return rendered(template, style, script, _tables(comparison), values)


def _tables(comparison: Comparison) -> dict[str, Any]:
    numbers = [_numbers(row) for row in comparison.rows]
    gradients = comparison.gradients
    return {
        "sites": {
            "titles": _TITLES,
            "numbers": _NUMBERS,
            "rows": [
                [*_texts(row), count(row.calls), *_shown(values[1:])]
                for row, values in zip(comparison.rows, numbers, strict=True)
            ],
            "keys": [[_key(each) for each in values] for values in numbers],
        },
        "gradients": {
            "titles": ("parameter", "difference", "cosine"),
            "numbers": 2,
            "rows": [
                [clean(each.name), number(each.rel), f"{each.cosine:.6f}"] for each in gradients
            ],
            "keys": [[_key(each.rel), _key(each.cosine)] for each in gradients],
        },
    }


def _texts(row: ComparedSite) -> list[str]:
    return [
        clean(row.op),
        clean(row.module),
        located(row.site),
        short_dtype(row.dtype) or "fp32",
        clean(row.reason),
        remarks(row),
    ]


def _numbers(row: ComparedSite) -> list[float]:
    return [
        row.calls, row.effect, row.rel, row.propagated_rel, row.sqnr_db, row.ulp, row.cosine,
        row.max_abs, row.range.smallest, row.range.largest,
    ]  # fmt: skip


def _shown(values: list[float]) -> list[str]:
    """Returns the numbers of a row as text, those of moderate size without exponents."""
    effect, rel, propagated, sqnr, ulp, cosine, *magnitudes = values
    return [
        *map(number, (effect, rel, propagated)),
        f"{sqnr:.0f}",
        f"{ulp:.2f}",
        f"{cosine:.6f}",
        *map(number, magnitudes),
    ]


def _key(value: float) -> float | None:
    """Returns what JSON has for a number: none for NaN, and the largest ones for infinity."""
    if math.isnan(value):
        return None
    return max(-1e308, min(1e308, value))


def notebook_part(comparison: Comparison, most: int = 30) -> str:
    """Returns the verdict and the rows of largest effect as HTML without scripts."""
    titles = ("op", "module", "in", "calls", "effect", "error", "passed on", "")
    head = "".join(f'<th scope="col">{each}</th>' for each in titles)
    lines = [
        (
            clean(row.op), clean(row.module), short_dtype(row.dtype) or "fp32", count(row.calls),
            number(row.effect), number(row.rel), number(row.propagated_rel), remarks(row),
        )
        for row in comparison.worst(most)
    ]  # fmt: skip
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in line)}</tr>" for line in lines
    )
    said = "".join(f"<p>{html.escape(each)}</p>" for each in verdict(comparison).split("; "))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div>{said}{table if lines else ''}</div>"
