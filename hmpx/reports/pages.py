"""Writing results to files: as JSON, or as an HTML page that needs no network.

Users' text is escaped, or is JSON that the script shows as text. The page's policy allows no other script, and
no loading.
"""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from .. import files
from .cells import clean, exponential, plain, size
from .table import ReportTable


def written(found: str, path: str | os.PathLike[str] | None) -> str:
    """Returns text, and writes it to ``path`` if given."""
    if path is not None:
        # File names may contain lone surrogates, which can't be encoded.
        files.write(found.encode("utf-8", "backslashreplace"), path)
    return found


class Written:
    """Base of results that are written to files; a subclass has `_data`, `_table` and `_page`."""

    _data: Callable[[], Mapping[str, Any]]
    _table: Callable[[], ReportTable]
    _page: Callable[[], str]

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns all figures as JSON, and writes it to ``path`` if given.

        Non-finite numbers become the strings ``"nan"``, ``"inf"``, ``"-inf"``.

        Raises:
            OptionError: The file can't be written.
        """
        found = json.dumps(plain(self._data()), indent=1, allow_nan=False)
        return written(found + "\n", path)[:-1]

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns a page that needs no network, and writes it to ``path`` if given.

        Raises:
            OptionError: The file can't be written.
        """
        return written(self._page(), path)

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns the rows as CSV, and writes them to ``path`` if given.

        Text that a spreadsheet would evaluate, such as a module named ``=1+1``, gets a leading ``'``.

        Raises:
            OptionError: The file can't be written.
        """
        return written(self._table().to_csv(), path)

    def to_dataframe(self) -> Any:
        """Returns the rows as a `pandas.DataFrame`; several dtypes in a row become one string.

        Raises:
            OptionError: pandas isn't installed.
        """
        return self._table().to_dataframe()


# --- pages ------------------------------------------------------------------------------------------

#: Characters in JSON that could end the surrounding script.
_ESCAPED: Final = str.maketrans({"<": r"\u003c", ">": r"\u003e", "&": r"\u0026"})


def page(
    title: str,
    heading: str,
    body: str,
    about: Mapping[str, str],
    *,
    script: str = "",
    data: Mapping[str, Any] | None = None,
    tables: Mapping[str, ReportTable] | None = None,
) -> str:
    """Returns a page: its body is HTML in which users' text is escaped, ``about`` is shown at the end.

    ``script`` and its ``data`` are added to the common JavaScript, which shows the ``tables`` of `table_section`.
    """
    found = {**(data or {}), "tables": {n: each.page_data() for n, each in (tables or {}).items()}}
    text = json.dumps(found, separators=(",", ":"), allow_nan=False)
    style = page_file("page.css")
    script = page_file("page.js") + script
    return filled(
        page_file("page.html"),
        title=title,
        heading=heading,
        body=_markup(body),
        about={clean(name): clean(value) for name, value in about.items()},
        style=_markup(style),
        script=_markup(script),
        style_hash=_content_hash(style),
        script_hash=_content_hash(script),
        data=_markup(text.translate(_ESCAPED)),
    )


def filled(template: str, **values: Any) -> str:
    """Renders a template with its values, which are escaped."""
    import jinja2  # torch depends on it; imported late because it is slow

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template).render(values)


def page_file(name: str) -> str:
    """Returns the text of a file in the folder ``page``."""
    return (importlib.resources.files(__package__) / "page" / name).read_text("utf-8")


def section(name: str, heading: str, *parts: str) -> str:
    """Returns a section of a page from HTML parts."""
    head = f'<h2 id="{name}">{html.escape(heading)}</h2>'
    return f'<section aria-labelledby="{name}">{head}{"".join(parts)}</section>'


def table_section(name: str, heading: str, *parts: str) -> str:
    """Returns a section for the table ``name``, which users can sort and search."""
    return section(
        name,
        heading,
        *parts,
        '<noscript><p class="error">This table needs JavaScript.</p></noscript>'
        f'<div class="tools"><label>Search <input id="{name}-search" type="search" '
        'autocomplete="off" spellcheck="false"></label>'
        f'<span id="{name}-count" class="note" role="status"></span></div>'
        f'<div id="{name}-table" class="scroll" role="region" aria-labelledby="{name}" '
        'tabindex="0"></div>',
    )


def paragraphs(texts: Iterable[str], kind: str = "") -> str:
    """Returns paragraphs of text as HTML."""
    start = f'<p class="{kind}">' if kind else "<p>"
    return "".join(f"{start}{html.escape(text)}</p>" for text in texts)


def _markup(text: str) -> Any:
    from markupsafe import Markup  # comes with jinja2

    return Markup(text)


def _content_hash(text: str) -> str:
    """Returns the hash that identifies a script or style in a Content-Security-Policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


# --- charts: errors along a model, for `compare` and `diff_runs`; bars, for `plan`; parts -------------

#: The width of a chart, in pixels.
CHART_WIDTH: Final = 960


def chart_section(name: str, heading: str, keys: Mapping[str, str], picture: str) -> str:
    """Returns a section of a page with a chart and its legend of kind -> meaning; ``""`` without a chart."""
    if not picture:
        return ""
    legend = " ".join(f'<span class="key {kind}">{said}</span>' for kind, said in keys.items())
    chart = f'<div class="scroll chart">{picture}</div>'
    return section(name, heading, f'<p class="legend">{legend}</p>', chart)


def by_depth(
    points: Sequence[tuple[str, int, float, str]],
    count: int,
    roundoffs: Mapping[str, float],
    label: str,
) -> str:
    """Returns a chart of relative errors in the order of ``count`` calls, on a logarithmic axis.

    A point is its kind, its place among the calls, its value, and what it is of. Those without a positive, finite value are left out; a line marks each type's unit roundoff.
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

    def line(kind: str, value: float) -> str:
        return f'<line class="{kind}" x1="{left}" x2="{CHART_WIDTH}" y1="{value:.1f}" y2="{value:.1f}"/>'

    parts = []
    for power in range(low, high + 1, max(1, (high - low) // 8)):
        parts.append(line("grid", y(10.0**power)))
        parts.append(svg_text(left - 6, y(10.0**power) + 4, f"1e{power}", "end"))
    for name, roundoff in roundoffs.items():
        parts.append(line("unit", y(roundoff)))
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


def bars(
    rows: Mapping[str, Mapping[str, int]], keys: Mapping[str, str], marks: Iterable[int], label: str
) -> str:
    """Returns a chart with a bar for each row, of bytes by kind; ``""`` if all are zero.

    ``keys`` are CSS class -> kind, in the order of a bar's parts; lines mark those ``marks`` that are within the bars.
    """
    sums = {name: sum(kinds.values()) for name, kinds in rows.items()}
    most = max(sums.values(), default=0)
    if not most:
        return ""
    left, height = 120, 34
    scale = (CHART_WIDTH - left - 80) / most
    bottom = height * len(rows)
    parts = []
    for index, (name, kinds) in enumerate(rows.items()):
        x, y = float(left), height * index + 4
        parts.append(svg_text(left - 8, y + 18, name, "end"))
        for key, kind in keys.items():
            count = kinds.get(kind, 0)
            parts.append(
                f'<rect class="{key}" x="{x:.1f}" y="{y}" width="{count * scale:.1f}" height="26">'
                f"{svg_title(f'{name}: {kind} {size(count)}')}</rect>"
            )
            x += count * scale
        parts.append(svg_text(x + 6, y + 18, size(sums[name])))
    for mark in marks:
        if mark <= most:
            x = left + mark * scale
            parts.append(f'<line class="unit" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom}"/>')
            parts.append(svg_text(x, bottom + 14, size(mark), "middle"))
    return svg_chart(bottom + 20, label, parts)


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
