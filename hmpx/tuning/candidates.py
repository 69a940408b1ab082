"""Candidates: what a search may keep in fp32, each with its score and with what keeping it costs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from ..policy import CastPolicy, load_policy

#: Where an op is called: its name, and the qualified name of the module; ``""`` outside of any.
Spot = tuple[str, str]

#: A set of candidates that are kept out of low precision, by name: in fp32, or ``"add=follows"``, or in
#: another type: ``"linear=bfloat16"``.
Kept = frozenset[str]

#: The type of what computes in low precision where all that it is given is, and in fp32 elsewhere.
FOLLOWS: Final = "follows"

#: How many spots stand for themselves where candidates are modules; the rest is grouped by op.
MOST_SPOTS: Final = 24

#: How many candidates there are at most, as long as there are fewer ops: each one that is kept costs an evaluation.
_MOST_CANDIDATES: Final = 32


#: A line in a list costs something, however little work its op does: so much of the model's work.
COST_OF_A_LINE: Final = 0.01


class Seconds(NamedTuple):
    """How long the calls of a spot take.

    Attributes:
        fp32: In fp32.
        low: In low precision, with the casts of their inputs.
    """

    fp32: float
    low: float


class Score(NamedTuple):
    """What is known of rounding an op in a module.

    Attributes:
        effect: Its first-order effect on the result.
        is_hard: Some of its values leave the low type's range.
        is_unseen: Some of its calls are rounded, but no gradient arrives at them, as at those that make
            tables of positions: their effect is not known.
    """

    effect: float = 0.0
    is_hard: bool = False
    is_unseen: bool = False


@dataclass(frozen=True)
class Candidate:
    """Something that is computed in fp32 or in low precision as a whole.

    Attributes:
        name: ``"softmax"``, or ``"encoder.0.attn:softmax"``.
        spots: The op and modules that it stands for.
        score: Its first-order effect on the result in low precision; None if that is not known.
        flops: Floating-point operations of one forward, and
        bytes: the bytes that these calls read and write in fp32.
        benefit: Their share of the model's work, from 0 to 1: of FLOPs and of bytes, half each.
        is_hard: Some of its values leave the low type's range.
        is_unseen: The score leaves out some of its calls, at which no gradient arrives.
        prior: Order where scores are unknown: the smallest is kept first.
        may_follow: It may also follow its inputs, call by call.
        saved: What low precision saves of the time of all calls in fp32, as a share; below 0 where it
            takes longer. None if that was not measured.
    """

    name: str
    spots: frozenset[Spot] = field(default=frozenset(), repr=False)
    score: float | None = None
    flops: int = 0
    bytes: int = 0
    benefit: float = 0.0
    is_hard: bool = False
    is_unseen: bool = False
    prior: float = 0.0
    may_follow: bool = False
    saved: float | None = None

    @property
    def is_free(self) -> bool:
        """Whether it is known that low precision saves no time: keeping it in fp32 costs nothing."""
        return self.saved is not None and self.saved <= 0


def timed(candidates: Iterable[Candidate], seconds: Mapping[Spot, Seconds]) -> list[Candidate]:
    """Returns the candidates with the time that low precision saves as their benefit."""
    whole = sum(each.fp32 for each in seconds.values()) or 1.0
    found = []
    for each in candidates:
        known = [seconds[spot] for spot in each.spots]
        saved = sum(one.fp32 - one.low for one in known) / whole
        found.append(replace(each, benefit=max(saved, 0.0), saved=saved))
    return found


def by_op(
    spots: Mapping[Spot, tuple[int, int]],
    scores: Mapping[Spot, Score] | None = None,
    *,
    names_modules: bool = False,
) -> list[Candidate]:
    """Returns a candidate for each op; those in one module only are named by it if ``names_modules``."""
    counts = Counter(op for op, _ in spots)

    def key(spot: Spot) -> str:
        return name_of(spot) if names_modules and counts[spot[0]] == 1 else spot[0]

    return _grouped(spots, scores, key)


def by_module(
    spots: Mapping[Spot, tuple[int, int]],
    scores: Mapping[Spot, Score] | None = None,
) -> list[Candidate]:
    """Returns a candidate for each spot that matters, and one for the rest of each op.

    A search needs an evaluation for each candidate that it keeps, so what has little effect by itself is
    kept or not by op.
    """
    if scores is None or len(spots) <= MOST_SPOTS:
        return _grouped(spots, scores, name_of)

    def importance(spot: Spot) -> tuple[bool, bool, float, Spot]:
        score = scores.get(spot, Score())
        return not score.is_hard, not score.is_unseen, -score.effect, spot

    others = len({op for op, _ in spots})
    most = max(0, min(MOST_SPOTS, _MOST_CANDIDATES - others))
    alone = set(sorted(spots, key=importance)[:most])
    return _grouped(spots, scores, lambda spot: name_of(spot) if spot in alone else spot[0])


def split(
    candidates: Iterable[Candidate], spots: Mapping[Spot, tuple[int, int]]
) -> list[Candidate]:
    """Returns the candidates with each that stands for several spots replaced by one a spot."""
    found = []
    for each in candidates:
        if len(each.spots) == 1:
            found.append(each)
            continue
        parts = {spot: spots[spot] for spot in each.spots}
        shares = {part.name: part for part in _grouped(parts, None, name_of)}
        whole = max(1, each.bytes)
        found += [
            replace(
                part,
                benefit=each.benefit * part.bytes / whole,
                prior=each.prior,
                is_hard=each.is_hard,
                saved=None if each.saved is None else each.saved * part.bytes / whole,
            )
            for part in shares.values()
        ]
    return found


def name_of(spot: Spot) -> str:
    """Returns the name of a spot: ``"encoder.0.attn:softmax"``; the op's outside of any module."""
    op, module = spot
    return f"{module}:{op}" if module else f":{op}"


def _grouped(
    spots: Mapping[Spot, tuple[int, int]],
    scores: Mapping[Spot, Score] | None,
    key: Callable[[Spot], str],
) -> list[Candidate]:
    groups: dict[str, list[Spot]] = {}
    for spot in spots:
        groups.setdefault(key(spot), []).append(spot)
    all_flops = max(1, sum(flops for flops, _ in spots.values()))
    all_bytes = max(1, sum(count for _, count in spots.values()))
    found = []
    for name, members in groups.items():
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
                prior=_prior(members[0][0]),
            )
        )
    return sorted(found, key=lambda each: each.name)


def _prior(op: str) -> float:
    """Returns 0 for ops that the default lists keep in fp32, 2 for those in low precision, else 1."""
    policy = load_policy().decisions.get(op)
    if policy is None:
        return 1.0
    return {CastPolicy.FP32: 0.0, CastPolicy.LOW: 2.0}.get(policy.cast_policy, 1.0)


def parted(member: str) -> tuple[str, str]:
    """Returns the candidate that a member of a set stands for, and its type there; ``""`` for fp32.

    Names of modules may hold ``=``, but an op comes behind them, and no op's or type's name holds ``:``.
    """
    name, _, other = member.rpartition("=")
    return (name, other) if name and ":" not in other else (member, "")


def bare(member: str) -> str:
    """Returns the name of the candidate that a member of a set stands for, without its type there."""
    return parted(member)[0]


def following(name: str) -> str:
    """Returns the member that stands for a candidate that follows its inputs."""
    return f"{name}={FOLLOWS}"


def is_following(member: str) -> bool:
    """Whether a member of a set follows its inputs."""
    return parted(member)[1] == FOLLOWS


def cost(candidate: Candidate) -> float:
    """Returns what keeping a candidate costs: a share of the model's work, and a line in a list."""
    return candidate.benefit + COST_OF_A_LINE


def is_within(kept: Kept, other: Kept) -> bool:
    """Whether all members of a set are in another, following their inputs there or in fp32."""
    return all(each in other or (is_following(each) and bare(each) in other) for each in kept)
