"""Shares of the work that a set leaves in low precision."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Final

from .candidates import Candidate, Kept, following
from .evaluation import Seen

_NOTHING: Final[Mapping[str, Seen]] = types.MappingProxyType({})


def shares(
    candidates: Sequence[Candidate], kept: Kept, seen: Mapping[str, Seen] = _NOTHING
) -> tuple[float, float]:
    """Returns the shares of FLOPs and of bytes that are computed in low precision, each from 0 to 1.

    Args:
        candidates: All candidates.
        kept: The set.
        seen: What was seen of the members that follow their inputs, in an evaluation of the set.
    """
    low = [(each, low_parts(each, kept, seen)) for each in candidates]
    return (
        _share(
            sum(each.flops * part for each, (part, _) in low),
            sum(each.flops for each in candidates),
        ),
        _share(
            sum(each.bytes * part for each, (_, part) in low),
            sum(each.bytes for each in candidates),
        ),
    )


def low_parts(candidate: Candidate, kept: Kept, seen: Mapping[str, Seen]) -> tuple[float, float]:
    """Returns the shares of a candidate's FLOPs and bytes that are in low precision beside a set."""
    if candidate.name in kept:
        return 0.0, 0.0
    if following(candidate.name) in kept and candidate.name in seen:
        return seen[candidate.name].flops, seen[candidate.name].bytes
    return 1.0, 1.0


def _share(part: float, whole: int) -> float:
    return part / whole if whole else 1.0
