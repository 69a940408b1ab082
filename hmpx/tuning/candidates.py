"""Candidates: ops that a search may keep in fp32, the cost of keeping them, and results of sets of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from ..policy import CastPolicy, load_policy

#: A call site of an op: its name, and the module's qualified name; ``""`` outside any module.
Spot = tuple[str, str]

#: Spot -> FLOPs and bytes of its calls.
Costs = Mapping[Spot, tuple[int, int]]

#: Candidates kept out of low precision: ``"add"`` in fp32, ``"add=follows"``, ``"linear=bfloat16"``.
Kept = frozenset[str]

#: The type of ops that are in low precision only if all their inputs are, and else in fp32.
FOLLOWS: Final = "follows"

#: Most spots that are candidates themselves when candidates are modules; the rest is grouped by op.
MOST_SPOTS: Final = 24

#: Most candidates, unless there are more ops: each kept one costs an evaluation.
_MOST_CANDIDATES: Final = 32

#: The cost of a line in a list, as a share of the model's work, however little work its op does.
COST_OF_A_LINE: Final = 0.01


class Score(NamedTuple):
    """The effect of rounding an op in a module."""

    effect: float = 0.0  # the first-order effect on the result
    is_hard: bool = False  # some of its values leave the low type's range
    is_unseen: bool = (
        False  # some of its calls are rounded but get no gradient: their effect is unknown
    )


Scores = Mapping[Spot, Score]


@dataclass(frozen=True)
class Candidate:
    """Something that is in fp32 or in low precision as a whole."""

    name: str  # "softmax", or "encoder.0.attn:softmax"
    spots: frozenset[Spot] = field(default=frozenset(), repr=False)  # the op and modules
    score: float | None = None  # its first-order effect on the result in low precision, if known
    flops: int = 0  # of its calls in one forward
    bytes: int = 0  # that these calls read and write in fp32
    benefit: float = 0.0  # their share of the model's work: of FLOPs and of bytes, half each
    is_hard: bool = False  # some of its values leave the low type's range
    is_unseen: bool = False  # the score excludes some of its calls, which get no gradient
    prior: float = 0.0  # order if scores are unknown: the smallest is kept first
    may_follow: bool = False  # it may also follow its inputs, call by call
    saved: float | None = None  # measured share of its fp32 time that low precision saves

    @property
    def is_free(self) -> bool:
        """Whether low precision is known to save no time, so that keeping it in fp32 is free."""
        return self.saved is not None and self.saved <= 0

    @property
    def cost(self) -> float:
        """The cost of keeping it: a share of the model's work, and a line in a list."""
        return self.benefit + COST_OF_A_LINE

    @property
    def op(self) -> str:
        """The op, in one or more modules."""
        return min(self.spots)[0]


def timed(
    candidates: Iterable[Candidate], seconds: Mapping[Spot, tuple[float, float]]
) -> list[Candidate]:
    """Returns the candidates with their saved time as benefit; ``seconds``: of each spot in fp32 and low."""
    whole = sum(fp32 for fp32, _ in seconds.values()) or 1.0
    found = []
    for each in candidates:
        saved = sum(seconds[spot][0] - seconds[spot][1] for spot in each.spots) / whole
        found.append(replace(each, benefit=max(saved, 0.0), saved=saved))
    return found


def by_op(spots: Costs, scores: Scores | None = None) -> list[Candidate]:
    """Returns a candidate for each op."""
    return _grouped(spots, scores, lambda spot: spot[0])


def by_module(spots: Costs, scores: Scores | None = None) -> list[Candidate]:
    """Returns a candidate for each spot that matters, and one for the rest of each op.

    Each kept candidate costs the search an evaluation, so spots of little effect are grouped by op.
    """
    alone = set(spots)
    if scores is not None and len(spots) > MOST_SPOTS:
        most = max(0, min(MOST_SPOTS, _MOST_CANDIDATES - len({op for op, _ in spots})))

        def importance(spot: Spot) -> tuple[bool, bool, float, Spot]:
            score = scores.get(spot, Score())
            return not score.is_hard, not score.is_unseen, -score.effect, spot

        alone = set(sorted(spots, key=importance)[:most])
    return _grouped(
        spots, scores, lambda spot: f"{spot[1]}:{spot[0]}" if spot in alone else spot[0]
    )


def _grouped(spots: Costs, scores: Scores | None, key: Callable[[Spot], str]) -> list[Candidate]:
    groups: dict[str, list[Spot]] = {}
    for spot in spots:
        groups.setdefault(key(spot), []).append(spot)
    all_flops = max(1, sum(flops for flops, _ in spots.values()))
    all_bytes = max(1, sum(count for _, count in spots.values()))
    priors = {CastPolicy.FP32: 0.0, CastPolicy.LOW: 2.0}
    found = []
    for name, members in sorted(groups.items()):
        flops = sum(spots[spot][0] for spot in members)
        count = sum(spots[spot][1] for spot in members)
        known = [] if scores is None else [scores.get(spot, Score()) for spot in members]
        found.append(
            Candidate(
                name,
                frozenset(members),
                score=None if scores is None else math.hypot(*[each.effect for each in known]),
                flops=flops,
                bytes=count,
                benefit=(flops / all_flops + count / all_bytes) / 2,
                is_hard=any(each.is_hard for each in known),
                is_unseen=any(each.is_unseen for each in known),
                prior=priors.get(load_policy()[members[0][0]].cast_policy, 1.0),
            )
        )
    return found


# --- members of sets ---------------------------------------------------------------------------------


def parted(member: str) -> tuple[str, str]:
    """Returns the candidate and the type of a member of a set; the type is ``""`` for fp32.

    Module names may contain ``=``, but the op comes after them, and op and type names contain no ``:``.
    """
    name, _, other = member.rpartition("=")
    return (name, other) if name and ":" not in other else (member, "")


def bare(member: str) -> str:
    """Returns the name of a member's candidate, without the type."""
    return parted(member)[0]


def following(name: str) -> str:
    """Returns the member for a candidate that follows its inputs."""
    return f"{name}={FOLLOWS}"


def is_following(member: str) -> bool:
    """Whether a member of a set follows its inputs."""
    return parted(member)[1] == FOLLOWS


def is_within(kept: Kept, other: Kept) -> bool:
    """Whether all members of a set are in another one, where they follow their inputs or are in fp32."""
    return all(each in other or (is_following(each) and bare(each) in other) for each in kept)


# --- results of a set --------------------------------------------------------------------------------


class Seen(NamedTuple):
    """Shares of a candidate's work, while a set was evaluated."""

    flops: float  # in low precision
    bytes: float  # in low precision
    given: float  # bytes of calls whose inputs were all low: those that are low if it follows its inputs


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a set: its error, and the shares of candidates that may follow their inputs."""

    error: float  # infinite where outputs are not finite
    seen: Mapping[str, Seen] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation of a search: whether a set passed, within the tolerance at that time, and why it ran."""

    kept: Kept
    phase: str  # "all fp32", "all low", "range", "prefix", "shipped", "follow", "prune", ...
    error: float
    passed: bool


def low_parts(candidate: Candidate, kept: Kept, seen: Mapping[str, Seen]) -> tuple[float, float]:
    """Returns the shares of a candidate's FLOPs and bytes in low precision with a set."""
    if candidate.name in kept:
        return 0.0, 0.0
    if following(candidate.name) in kept and candidate.name in seen:
        return seen[candidate.name].flops, seen[candidate.name].bytes
    return 1.0, 1.0


def shares(
    candidates: Sequence[Candidate], kept: Kept, seen: Mapping[str, Seen] | None = None
) -> tuple[float, float]:
    """Returns the shares of FLOPs and of bytes in low precision; ``seen`` is from an evaluation of the set."""
    parts = [low_parts(each, kept, seen or {}) for each in candidates]
    flops = sum(each.flops for each in candidates)
    count = sum(each.bytes for each in candidates)
    low_flops = sum(each.flops * part for each, (part, _) in zip(candidates, parts, strict=True))
    low_bytes = sum(each.bytes * part for each, (_, part) in zip(candidates, parts, strict=True))
    return low_flops / flops if flops else 1.0, low_bytes / count if count else 1.0
