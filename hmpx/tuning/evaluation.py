"""One evaluation of a search, as data."""

from __future__ import annotations

from dataclasses import dataclass

from .candidates import Kept


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation of a search.

    Attributes:
        kept: What was computed in fp32.
        phase: What it was for: ``"all fp32"``, ``"all low"``, ``"free"``, ``"unseen"``, ``"range"``,
            ``"prefix"``, ``"exchange"``, ``"prune"``, ``"sweep"``, ``"fresh inputs"``.
        error: The error; infinite where outputs are not finite.
        passed: Whether that was within the tolerance of that time.
    """

    kept: Kept
    phase: str
    error: float
    passed: bool
