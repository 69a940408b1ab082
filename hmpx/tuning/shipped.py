"""The shipped lists as sets: what any user has is tried, too, and what is found must not be behind it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from ..policy import CastPolicy, Policy
from .asking import Ask, Asking, Outcome, Seen, shares
from .candidates import Candidate, Kept, bare, cost, following, is_following, is_within

#: A shipped set is not tried if one that keeps more fails by more than this factor: errors are not quite monotone.
_CLEARLY: Final = 1.05


def sets_of(policies: Iterable[Policy], candidates: Iterable[Candidate]) -> tuple[Kept, ...]:
    """Returns the set that each policy keeps: in fp32, or following, of ops that it has in neither list."""
    candidates = list(candidates)
    found = [
        frozenset(member for each in candidates if (member := _member(policy, each)))
        for policy in policies
    ]
    return tuple(dict.fromkeys(found))


def _member(policy: Policy, candidate: Candidate) -> str:
    op = min(candidate.spots)[0]
    decided = policy[op].cast_policy
    if decided is CastPolicy.LOW:
        return ""
    follows = decided is not CastPolicy.FP32 and candidate.may_follow
    return following(candidate.name) if follows else candidate.name


def best_shipped(
    candidates: Sequence[Candidate],
    kept: Kept,
    shipped: Iterable[Kept],
    outcomes: dict[Kept, Outcome],
    tolerance: float,
) -> Asking[Kept | None]:
    """Yields what to evaluate, and returns the best shipped set; None if none is better than ``kept``.

    Those that keep most are tried first: if they fail, so do the others. What can't have more in low
    precision than ``kept``, whatever follows what, isn't tried.
    """
    all_low = outcomes[frozenset()].seen
    have = kept_in_fp32(candidates, kept, outcomes)
    best: list[tuple[tuple[float, int], list[str], Kept]] = []
    sets = {_without_doubt(each, all_low) for each in shipped} - {frozenset()}
    for each in sorted(sets, key=lambda each: (-_weight(candidates, each), sorted(each))):
        if any(
            not outcome.error <= _CLEARLY * tolerance and is_within(each, other)
            for other, outcome in outcomes.items()
        ):
            continue
        least, _ = kept_in_fp32(candidates, each, {})
        if have[0] <= least:
            continue
        error = yield Ask(each, "shipped")
        if not error <= tolerance:
            continue
        found = _settled(each, outcomes[each].seen)
        outcomes[found] = outcomes[each]
        keeps = kept_in_fp32(candidates, found, outcomes)
        if keeps < have:
            best.append((keeps, sorted(found), found))
    return min(best)[-1] if best else None


def _without_doubt(kept: Kept, all_low: Mapping[str, Seen]) -> Kept:
    """Returns the set with that in fp32 which follows, and is given no low precision by anything."""
    return frozenset(
        bare(each) if bare(each) in all_low and all_low[bare(each)].given <= 0 else each
        for each in kept
    )


def _settled(kept: Kept, seen: Mapping[str, Seen]) -> Kept:
    """Returns a set that computes the same, by what was seen of ``kept``.

    What follows and has all of its calls in low precision is taken out; what has none is in fp32.
    """
    parts = {each: seen.get(bare(each)) for each in kept if is_following(each)}
    low = {each for each, part in parts.items() if part and min(part.flops, part.bytes) >= 1}
    wide = {each for each, part in parts.items() if part and part.given <= 0}
    return kept - low - wide | {bare(each) for each in wide}


def kept_in_fp32(
    candidates: Sequence[Candidate], kept: Kept, outcomes: Mapping[Kept, Outcome]
) -> tuple[float, int]:
    """Returns what sets compete by: what one keeps in fp32, and how many members it has.

    That is the sum of the shares of FLOPs and of bytes; the least that it may be where nothing was seen of
    a member.
    """
    flops, count = shares(candidates, kept, outcomes[kept].seen if kept in outcomes else {})
    return round(2 - flops - count, 9), len(kept)


def _weight(candidates: Sequence[Candidate], kept: Kept) -> float:
    """Returns what a set keeps where what follows counts half: more than each set that is within it."""
    weights = {each.name: cost(each) for each in candidates}
    return sum(weights[bare(each)] / (2 if is_following(each) else 1) for each in kept)
