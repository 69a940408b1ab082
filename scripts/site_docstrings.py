"""How the API's page reads docstrings: `Example:` is the section that Google's style calls `Examples:`."""

from __future__ import annotations

from typing import Any

import griffe


class Examples(griffe.Extension):
    """Shows examples as code with what it prints."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Renames the section; griffe calls this for all that has a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
