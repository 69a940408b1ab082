"""What searches ask, what comes of it, and how much of the work that leaves in low precision."""

from __future__ import annotations

import types
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

from .candidates import Candidate, Kept, following

T = TypeVar("T")


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
class Ask:
    """A set that is to be evaluated.

    Attributes:
        kept: The set.
        phase: What it is asked for: see `Evaluation`.
        ahead: Sets that may be asked for next, the likeliest first.
    """

    kept: Kept
    phase: str
    ahead: tuple[Kept, ...] = ()


#: Yields what to evaluate, is sent what came of it, and returns a set.
Search = Generator[Ask, Outcome, Kept]

#: A part of a search, which is sent errors only.
Asking = Generator[Ask, float, T]


def noted(asking: Asking[T], outcomes: dict[Kept, Outcome]) -> Generator[Ask, Outcome, T]:
    """Passes on what is asked, puts what comes of it into ``outcomes``, and sends the errors."""
    try:
        asked = next(asking)
        while True:
            outcomes[asked.kept] = yield asked
            asked = asking.send(outcomes[asked.kept].error)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]


def by_errors(asking: Asking[Kept]) -> Search:
    """Returns a search of one that looks at errors only."""
    return noted(asking, {})


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation of a search.

    Attributes:
        kept: What was computed in fp32, or followed its inputs.
        phase: What it was for: ``"all fp32"``, ``"all low"``, ``"free"``, ``"unseen"``, ``"range"``,
            ``"prefix"``, ``"shipped"``, ``"prune"``, ``"sweep"``, ``"follow"``,
            ``"fresh inputs"``.
        error: The error; infinite where outputs are not finite.
        passed: Whether that was within the tolerance of that time.
    """

    kept: Kept
    phase: str
    error: float
    passed: bool


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
