"""The HTML page of all hmpx reports: one file that needs no network.

Users' text is escaped, or is JSON that the script shows as text. The page's policy allows no other script, and
no loading.
"""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from .table import Table

#: Characters in JSON that could end the surrounding script.
_ESCAPED: Final = str.maketrans({"<": r"\u003c", ">": r"\u003e", "&": r"\u0026"})


def page(
    title: str,
    heading: str,
    body: str,
    *,
    script: str = "",
    data: Mapping[str, Any] | None = None,
    tables: Mapping[str, Table] | None = None,
) -> str:
    """Returns a page.

    Args:
        title: The page's title.
        heading: The page's heading.
        body: The HTML after the heading, with users' text escaped.
        script: JavaScript after the common JavaScript.
        data: The script's data, as JSON.
        tables: The tables of `table_section`, by name.
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
