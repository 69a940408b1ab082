"""What `compare` has found, and its views."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .rows import ComparedGradient, ComparedSite


@dataclass(frozen=True)
class Comparison:
    """What low precision does to each call of a model, by effect.

    Attributes:
        rows: A row per op, module and line, largest effect first.
        gradients: A row per parameter, largest relative difference first.
        loss: The loss in float32, and
        low_loss: in low precision; NaN without ``loss_fn``.
        output_rel: Norm of the difference of the outputs over the norm in float32.
        compiled_rel: The same of the compiled model against the uncompiled, both in low precision; NaN if
            the model isn't compiled.
        unmatched: Calls that the model has made in float32 only.
    """

    rows: tuple[ComparedSite, ...]
    gradients: tuple[ComparedGradient, ...] = ()
    loss: float = math.nan
    low_loss: float = math.nan
    output_rel: float = math.nan
    compiled_rel: float = math.nan
    unmatched: int = 0

    def worst(self, number: int = 10) -> tuple[ComparedSite, ...]:
        """Returns the rows of largest effect."""
        return self.rows[:number]
