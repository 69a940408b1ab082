"""What `compare` has found, and its views."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from ..reports import csv_lines, plain, written
from . import html_page, text
from .rows import ComparedGradient, ComparedSite

#: The version of the JSON that `Comparison.to_json` writes.
SCHEMA: Final = 1


@dataclass(frozen=True)
class Comparison:
    """What low precision does to each call of a model, by effect.

    Printing it prints a verdict, the rows of largest effect, and the gradients that differ most.

    Attributes:
        rows: A row per op, module and line, largest effect first.
        gradients: A row per parameter, largest relative difference first.
        loss: The loss in float32, and
        low_loss: in low precision; NaN without ``loss_fn``.
        output_rel: Norm of the difference over the norm in float32, of the floating-point outputs. Python
            floats count only if the model returns no floating-point tensor or array.
        output_notes: Differences in other outputs, and outputs that can't be compared.
        compiled_rel: The same of the compiled model against the uncompiled, both in low precision; NaN if
            the model isn't compiled.
        unmatched: Calls that the model has made in float32 only.
        backward_error: What the backward failed with, without ``loss_fn``: effects are unknown then.

    Example:
        >>> comparison = hmpx.compare(torch.nn.Linear(8, 2), torch.ones(4, 8))
        >>> [(row.op, row.dtype, row.fits) for row in comparison.rows]
        [('linear', 'bfloat16', True)]
    """

    rows: tuple[ComparedSite, ...]
    gradients: tuple[ComparedGradient, ...] = ()
    loss: float = math.nan
    low_loss: float = math.nan
    output_rel: float = math.nan
    output_notes: tuple[str, ...] = ()
    compiled_rel: float = math.nan
    unmatched: int = 0
    backward_error: str | None = None

    def worst(self, number: int = 10) -> tuple[ComparedSite, ...]:
        """Returns the rows of largest effect."""
        return self.rows[:number]

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns the comparison as JSON, and writes it to ``path`` if that is given.

        What is not finite is one of the texts ``"nan"``, ``"inf"``, ``"-inf"``.

        Raises:
            OptionError: The file can't be written.
        """
        found = {"hmpx_comparison": SCHEMA, **asdict(self)}
        return written(json.dumps(plain(found), indent=1, allow_nan=False) + "\n", path)[:-1]

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns the rows as CSV, and writes them to ``path`` if that is given.

        Raises:
            OptionError: The file can't be written.
        """
        names = [field.name for field in fields(ComparedSite) if field.name != "exponents"]
        lines = [[_cell(getattr(row, name)) for name in names] for row in self.rows]
        return written(csv_lines([names, *lines]), path)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns a page that needs no network, and writes it to ``path`` if that is given.

        Raises:
            OptionError: The file can't be written.
        """
        return written(html_page.page(self), path)

    def __str__(self) -> str:
        return text.text(self)

    def _repr_html_(self) -> str:
        return html_page.notebook_part(self)


def _cell(value: Any) -> Any:
    return " to ".join(map(str, value)) if isinstance(value, tuple) else value
