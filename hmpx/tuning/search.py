"""Searches for the smallest set to keep in fp32: ranks, grows to a passing set, proves each member necessary.

Every decision depends only on the errors received, so that a journal can replay a search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from ..policy import CastPolicy, Policy
from .candidates import (
    Candidate,
    Kept,
    Outcome,
    bare,
    following,
    is_following,
    is_within,
    shares,
)

#: Candidates without a gradient, or whose values leave the range, are harmless if the error with only these in
#: low precision is below this share of the tolerance; else they are kept until they are pruned.
_UNFELT: Final = 0.3

#: A shipped set is skipped if a larger one fails by more than this factor: errors are not quite monotone.
_CLEARLY: Final = 1.05

#: Most failures of sets with one more member following its inputs, and the least share of the model's work
#: that each must bring into low precision.
_MOST_FAILURES: Final = 2
_LEAST: Final = 0.002

#: Evaluates a set in a stage of the search.
Evaluate = Callable[[Kept, str], Outcome]


def sets_of(policies: Iterable[Policy], candidates: Iterable[Candidate]) -> tuple[Kept, ...]:
    """Returns the set that each policy keeps in fp32; ops in neither list follow their inputs."""
    candidates = list(candidates)

    def member(policy: Policy, each: Candidate) -> str:
        decided = policy[each.op].cast_policy
        if decided is CastPolicy.LOW:
            return ""
        follows = decided is not CastPolicy.FP32 and each.may_follow
        return following(each.name) if follows else each.name

    found = [frozenset(filter(None, [member(p, each) for each in candidates])) for p in policies]
    return tuple(dict.fromkeys(found))


class Search:
    """One search among candidates, at one tolerance."""

    def __init__(
        self,
        candidates: Iterable[Candidate],
        tolerance: float,
        evaluate: Evaluate,
        shipped: Iterable[Kept] = (),
    ) -> None:
        """Prepares a search. Keeping all candidates is known to pass.

        If one of the sets that shipped lists keep passes, the result has at least as much in low precision, in
        the sum of the shares of FLOPs and of bytes.
        """
        self._candidates = sorted(candidates, key=lambda each: each.name)
        self._tolerance, self._evaluate = tolerance, evaluate
        self._shipped = set(shipped) - {frozenset()}
        self._everything = frozenset(each.name for each in self._candidates)
        self._outcomes = {self._everything: Outcome(0.0)}

    def run(self) -> Kept:
        """Returns a 1-minimal set within the tolerance: no single member can be removed."""
        nothing: Kept = frozenset()
        if not self._candidates or self._passes(nothing, "all low"):
            return nothing
        return self._minimal(self._followed(self._best_shipped(self._passing())))

    def _error(self, kept: Kept, stage: str) -> float:
        if kept not in self._outcomes:
            self._outcomes[kept] = self._evaluate(kept, stage)
        return self._outcomes[kept].error

    def _passes(self, kept: Kept, stage: str) -> bool:
        return self._error(kept, stage) <= self._tolerance

    def _failed(self, kept: Kept, factor: float = 1.0) -> bool:
        """Whether a larger set has failed."""
        return any(
            not outcome.error <= factor * self._tolerance and is_within(kept, other)
            for other, outcome in self._outcomes.items()
        )

    # --- a set that passes ---------------------------------------------------------------------------

    def _passing(self) -> Kept:
        """Returns a passing set with few unnecessary members."""
        error = self._error(frozenset(), "all low")
        suspects = frozenset(e.name for e in self._candidates if e.is_hard or e.is_unseen)
        if suspects and math.isfinite(error):
            others = self._everything - suspects
            if others and self._error(others, "unseen") <= _UNFELT * self._tolerance:
                suspects = frozenset()
        if suspects:
            error = self._error(suspects, "range")
            if error <= self._tolerance:
                return suspects
        rest = [each for each in self._candidates if each.name not in suspects]
        if all(each.score is None for each in rest):
            rest.sort(key=lambda each: (each.prior, each.benefit, each.name))
        else:
            rest.sort(key=lambda each: (-((each.score or 0.0) ** 2) / each.cost, each.name))
        return self._prefix(suspects, rest, error)

    def _prefix(self, base: Kept, ranking: Sequence[Candidate], error: float) -> Kept:
        """Returns the base with the shortest prefix of the ranking that passes.

        Gallops from none to the first that passes, guided by squared scores, then bisects.
        """
        squares = [(each.score or 0.0) ** 2 for each in ranking]

        def prefix(length: int) -> Kept:
            return base | {each.name for each in ranking[:length]}

        low, high, step = 0, len(ranking), 1
        while high - low > 1:
            if high == len(ranking):
                guess = max(self._predicted(squares, low, error), low + step)
                step *= 2
            else:
                guess = (low + high) // 2
            guess = min(max(guess, low + 1), high - 1)
            found = self._error(prefix(guess), "prefix")
            if found <= self._tolerance:
                high = guess
            else:
                low, error = guess, found
        return prefix(high)

    def _predicted(self, squares: Sequence[float], low: int, error: float) -> int:
        """Returns the prefix length at which the rest is predicted to pass, by the error at ``low``."""
        rest = sum(squares[low:])
        if rest <= 0:
            return (low + len(squares)) // 2
        if not math.isfinite(error):
            return low + 1
        allowed = rest * (self._tolerance / error) ** 2
        for length in range(low, len(squares)):
            if rest <= allowed:
                return length
            rest -= squares[length]
        return len(squares)

    # --- shipped sets --------------------------------------------------------------------------------

    def _best_shipped(self, kept: Kept) -> Kept:
        """Returns the best shipped set; ``kept`` if none is better.

        Tries those that keep most first: if they fail, so do the others. Skips those that can't have more in
        low precision than ``kept``, whatever follows its inputs.
        """
        costs = {each.name: each.cost for each in self._candidates}
        weights = {
            kept: sum(costs[bare(each)] / (2 if is_following(each) else 1) for each in kept)
            for kept in self._shipped
        }
        best = kept
        for each in sorted(weights, key=lambda each: (-weights[each], sorted(each))):
            if self._failed(each, _CLEARLY) or self._kept_work(best) <= self._kept_work(each):
                continue
            if self._passes(each, "shipped") and self._kept_work(each) < self._kept_work(best):
                best = each
        return kept if best is kept else self._settled(best)

    def _kept_work(self, kept: Kept) -> float:
        """Returns the shares of FLOPs and bytes that a set keeps in fp32; a lower bound if unknown."""
        seen = self._outcomes[kept].seen if kept in self._outcomes else {}
        return round(2 - sum(shares(self._candidates, kept, seen)), 9)

    def _settled(self, kept: Kept) -> Kept:
        """Returns an equivalent set, evaluated.

        A member that follows its inputs is removed if all of its calls are low, and put in fp32 if none are.
        """
        found = set(kept)
        for member in filter(is_following, kept):
            part = self._outcomes[kept].seen.get(bare(member))
            if part and min(part.flops, part.bytes) >= 1:
                found.remove(member)
            elif part and part.given <= 0:
                found = found - {member} | {bare(member)}
        self._error(frozenset(found), "shipped")
        return frozenset(found)

    # --- fewer members -------------------------------------------------------------------------------

    def _followed(self, kept: Kept) -> Kept:
        """Lets members follow their inputs where the set still passes, those with most work first.

        Only tries members with calls of both kinds: with low-precision inputs alone, and with others. Otherwise
        it makes no difference, or the same as removing the member.
        """
        tried: set[str] = set()
        failures = 0
        while failures < _MOST_FAILURES:
            seen = self._outcomes[kept].seen if kept in self._outcomes else {}
            gains = [
                (each.benefit * seen[each.name].given, each.name)
                for each in self._candidates
                if each.name in (kept - tried) & seen.keys() and 0 < seen[each.name].given < 1
            ]
            gain, name = max(gains, default=(0.0, ""))
            if gain < _LEAST:
                break
            tried.add(name)
            trial = kept - {name} | {following(name)}
            if self._failed(trial):
                continue
            if self._passes(trial, "follow"):
                kept = trial
            else:
                failures += 1
        return kept

    def _minimal(self, kept: Kept) -> Kept:
        """Returns a subset of a passing set in which each member is necessary.

        First removes blocks, doubling while they are unnecessary: of out-of-range members and those with unknown
        effect, then the weakest. After each removal all necessary members are tried again.
        """
        member = {bare(each): each for each in kept}
        weakest = sorted(
            (each for each in self._candidates if each.name in member),
            key=lambda each: (
                not each.is_hard,
                not each.is_unseen,
                each.score or -each.prior,
                -each.benefit,
                each.name,
            ),
        )
        needed: list[str] = []
        waiting, block = [member[each.name] for each in weakest], 1
        while waiting:
            part = waiting[:block]
            if self._passes(kept - {*part}, "prune"):
                kept -= {*part}
                waiting, needed = waiting[len(part) :] + needed, []
                block *= 2
            elif len(part) > 1:
                block = len(part) // 2
            else:
                needed.append(waiting.pop(0))
                block = 1
        return kept
