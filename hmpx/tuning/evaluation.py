"""One evaluation of a search, and what came of it, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .candidates import Kept


class Seen(NamedTuple):
    """What the calls of a candidate computed in, while a set was evaluated.

    Attributes:
        flops: The share of its floating-point operations that were in low precision, from 0 to 1, and
        bytes: of its bytes.
        given: The share of its bytes that are of calls to which only low precision was given: where it
            follows its inputs, no others are in low precision.
    """

    flops: float
    bytes: float
    given: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a set.

    Attributes:
        error: The error; infinite where outputs are not finite.
        seen: Name of each candidate that may follow its inputs -> what its calls computed in.
    """

    error: float
    seen: Mapping[str, Seen] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation of a search.

    Attributes:
        kept: What was computed in fp32, or followed its inputs.
        phase: What it was for: ``"all fp32"``, ``"all low"``, ``"free"``, ``"unseen"``, ``"range"``,
            ``"prefix"``, ``"shipped"``, ``"exchange"``, ``"prune"``, ``"sweep"``, ``"follow"``,
            ``"fresh inputs"``.
        error: The error; infinite where outputs are not finite.
        passed: Whether that was within the tolerance of that time.
    """

    kept: Kept
    phase: str
    error: float
    passed: bool
