"""Which names policy files have."""

from __future__ import annotations

from typing import Final

from ...arguments import is_a

#: Endings of the files' names.
SUFFIXES: Final = (".yaml", ".yml", ".json")


def is_policy_file(path: object) -> bool:
    """Whether ``path`` has the name of a policy file."""
    return is_a(path, str) and str.__str__(path).endswith(SUFFIXES)
