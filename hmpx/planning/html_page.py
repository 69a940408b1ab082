"""A plan as one HTML page that needs no network, and as a part of a notebook."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Final

from ..reports import KINDS, clean, page_file, rendered, size
from .text import headline, memory_rows, remedies, verdict

if TYPE_CHECKING:
    from .result import Plan

_BAR_HEIGHT: Final = 30
_LABELS: Final = 130
_WIDTH: Final = 900


def page(plan: Plan) -> str:
    """Returns the page."""
    from markupsafe import Markup  # torch depends on it

    package = str(__package__)
    style = page_file("hmpx.reports", "report.css") + page_file(package, "plan.css")
    values = {
        "headline": headline(plan),
        "verdict": verdict(plan),
        "remedies": list(remedies(plan)),
        "memory": Markup(_memory_table(plan)),  # escaped there, as are the others
        "bars": Markup(_bars(plan)),
        "kinds": _kinds(plan),
        "all_kinds": list(KINDS),
        "by_op": Markup(plan.report.by_op().html_table()),
        "by_module": Markup(plan.report.by_module().html_table()),
    }
    return rendered(page_file(package, "plan.html"), style, "", {}, values)


def notebook_part(plan: Plan) -> str:
    """Returns the verdict, the table of memory and what to do as HTML without scripts."""
    said = "".join(f"<li>{html.escape(each)}</li>" for each in remedies(plan))
    lines = f"<p><strong>{html.escape(headline(plan))}</strong></p><p>{verdict(plan)}</p>"
    return f"<div>{lines}{_memory_table(plan)}<ul>{said}</ul></div>"


def _memory_table(plan: Plan) -> str:
    titles = ("", *(run.name for run in plan.runs))
    head = "".join(f'<th scope="col">{html.escape(each)}</th>' for each in titles)
    body = "".join(
        f'<tr><th scope="row">{html.escape(name.strip())}</th>'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for name, cells in memory_rows(plan)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _kinds(plan: Plan) -> list[str]:
    present = {kind for run in plan.runs for kind in run.memory.peak.kinds}
    return [kind for kind in KINDS if kind in present]


def _bars(plan: Plan) -> str:
    """Returns a bar a run: what there is at its peak, by kind."""
    most = max((run.memory.peak_bytes for run in plan.runs), default=0)
    if not most:
        return ""
    parts = []
    room = _WIDTH - _LABELS - 90
    for row, run in enumerate(plan.runs):
        y, x = row * _BAR_HEIGHT + 4, float(_LABELS)
        parts.append(f'<text x="0" y="{y + 15}">{html.escape(clean(run.name))}</text>')
        for place, kind in enumerate(KINDS):
            count = run.memory.peak.kinds.get(kind, 0)
            if count:
                width = room * count / most
                said = f"{run.name}: {kind} {size(count)}"
                parts.append(
                    f'<rect class="kind-{place}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="20">'
                    f"<title>{html.escape(said)}</title></rect>"
                )
                x += width
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 15}">{size(run.memory.peak_bytes)}</text>')
    height = len(plan.runs) * _BAR_HEIGHT
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="Memory of tensors at the peak">'
        f"{''.join(parts)}</svg>"
    )
