"""The ``.ini`` files of facts that come with hmpx, read as text.

`configparser` gives the same result, but takes much longer, before each program's first op.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Mapping


def read_sections(package: str, name: str) -> Mapping[str, Mapping[str, str]]:
    """Returns the file ``name`` in ``package``: section -> key -> value, ``""`` for keys without one."""
    text = importlib.resources.files(package).joinpath(name).read_text("utf-8")
    found: dict[str, dict[str, str]] = {}
    section: dict[str, str] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if not line or line[0] == "#":
            continue
        if line[0] == "[" and line[-1] == "]":
            if line in found:
                raise ValueError(f"{name}:{number}: {line} is there twice")
            section = found[line] = {}
            continue
        key, _, value = line.partition("=")
        key = key.rstrip()
        if section is None or not key or key[0].isspace() or key in section:
            raise ValueError(f"{name}:{number}: expected one new name, or a section: {line!r}")
        section[key] = value.strip()
    return {header[1:-1]: keys for header, keys in found.items()}
