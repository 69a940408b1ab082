"""Pages that need no network: a template, a style and a script, in one file of HTML.

Text of users gets into it escaped, or as JSON that the script shows as text; the page's policy lets no
other script run, and nothing be loaded.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
from collections.abc import Mapping
from typing import Any


def rendered(
    template: str, style: str, script: str, data: object, values: Mapping[str, Any]
) -> str:
    """Returns a page.

    Args:
        template: The template,
        style: the style, and
        script: the script; their texts.
        data: What the script gets, as JSON.
        values: What the template shows; escaped unless it is markup.
    """
    import jinja2  # torch depends on it; imported where it is needed, for the time that takes
    from markupsafe import Markup

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template).render(
        style=Markup(style),
        script=Markup(script),
        style_hash=content_hash(style),
        script_hash=content_hash(script),
        data=Markup(script_json(data)),
        **values,
    )


def page_file(package: str, name: str) -> str:
    """Returns the text of a file in the folder ``page`` of a package."""
    folder = importlib.resources.files(package) / "page"
    return folder.joinpath(name).read_text("utf-8")


def content_hash(text: str) -> str:
    """Returns what a Content-Security-Policy names a script or style by."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def script_json(found: object) -> str:
    """Returns JSON that can stand in an HTML script: nothing in it ends the script."""
    text = json.dumps(found, separators=(",", ":"), allow_nan=False)
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")
