"""How the API's page reads docstrings: `Example:` is the section that Google's style calls `Examples:`."""

from __future__ import annotations

from typing import Any

import griffe


class Examples(griffe.Extension):
    """Shows examples as code with what it prints, and no arguments that users cannot give."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Renames the section; griffe calls this for all that has a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
        if isinstance(obj, griffe.Function):  # arguments that only make an error's message
            for name in ("_too_many", "_unknown"):
                if name in obj.parameters:
                    del obj.parameters[name]
