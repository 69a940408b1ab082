"""Exchanges: sets that cost less than the one at hand and may pass, by effects calibrated on what was measured.

Pure arithmetic on candidates and errors; it evaluates nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from .asking import Outcome, Seen, low_parts
from .bounds import ANYTHING, Work, is_within
from .candidates import Candidate, Kept, following

#: A line in a list costs something, however little work its op does: so much of the model's work.
COST_OF_A_LINE: Final = 0.01

#: An exchange has to be expected to bring so much of the model's work into low precision.
_LEAST: Final = 0.006

#: How far predictions of squared errors are off: one scale of a logistic distribution of their logarithm.
_WIDTH: Final = 0.2

#: Predicted squared errors up to which sets are looked for, in squared tolerances: predictions may be too large.
_MARGINS: Final = (0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0)

#: Errors beyond so many tolerances tell no more than that they are too large.
_CLIPPED: Final = 10.0

#: Squared effects, in squared tolerances, that are assumed where none is known, or where it is 0.
_UNKNOWN: Final = 0.3**2
_NO_EFFECT: Final = 0.02**2

#: How fast effects are fitted to errors: a rate, and how often all errors are gone through.
_FITTING: Final = ((0.7, 30), (0.3, 20))

#: A part of a set that fails by more than this factor is not tried: errors are not quite monotone.
_CLEARLY: Final = 1.01

#: Predicted and measured squared errors that differ by less agree.
_AGREES: Final = 1.002

_NOTHING: Final[Mapping[str, Seen]] = {}

#: Work branches that are looked at for one set.
_MOST_BRANCHES: Final = 3_000


@dataclass(frozen=True, slots=True)
class Exchange:
    """A set that may take the place of another.

    Attributes:
        kept: The set.
        promise: By how much less of the model's work it keeps in fp32, times the chance that it passes.
    """

    kept: Kept
    promise: float


def cost(candidate: Candidate) -> float:
    """Returns what keeping a candidate costs: a share of the model's work, and a line in a list."""
    return candidate.benefit + COST_OF_A_LINE


def cost_of(
    candidates: Sequence[Candidate], kept: Kept, seen: Mapping[str, Seen] = _NOTHING
) -> float:
    """Returns what keeping a set costs; ``seen`` has what those that follow their inputs compute in."""
    return sum(
        _cost_of_member(each, kept, seen)
        for each in candidates
        if each.name in kept or following(each.name) in kept
    )


def _cost_of_member(candidate: Candidate, kept: Kept, seen: Mapping[str, Seen]) -> float:
    low = following(candidate.name) in kept and candidate.name in seen
    part = 1 - seen[candidate.name].bytes if low else 1.0
    return candidate.benefit * part + COST_OF_A_LINE


def exchanges(
    candidates: Sequence[Candidate],
    outcomes: Mapping[Kept, Outcome],
    kept: Kept,
    fixed: Kept,
    tolerance: float,
    *,
    most: Work = ANYTHING,
) -> list[Exchange]:
    """Returns sets to try in place of ``kept``, the most promising first; none if none is worth it.

    Members that follow their inputs do so in these sets, too, or aren't in them.

    Args:
        candidates: What may be kept.
        outcomes: What was measured.
        kept: The set at hand, which passes.
        fixed: Its members that are not exchanged.
        tolerance: The largest error that passes.
        most: What a set may keep in fp32 at most.
    """
    effects = calibrated(candidates, outcomes, tolerance)
    seen = outcomes[kept].seen if kept in outcomes else _NOTHING
    terms = _terms(candidates, effects, kept, seen)
    now = cost_of(candidates, kept, seen)
    found: dict[Kept, Exchange] = {}
    for margin in _MARGINS:
        tried = _cheapest(
            terms,
            needed=sum(effects.values()) - margin * tolerance**2,
            below=now - _LEAST,
            fixed=fixed,
            most=most,
            is_new=lambda each: _is_new(each, outcomes, tolerance),
        )
        if tried is None or tried in found:
            continue
        members = [each for each in terms if each.member in tried]
        rest = sum(effects.values()) - sum(each.gain for each in members)
        off = math.log(max(rest, 1e-300) / tolerance**2) / _WIDTH
        chance = 1 / (1 + math.exp(min(off, 500.0)))
        found[tried] = Exchange(tried, (now - sum(each.cost for each in members)) * chance)
    worth = [each for each in found.values() if each.promise >= _LEAST]
    return sorted(worth, key=lambda each: (-each.promise, sorted(each.kept)))


@dataclass(frozen=True, slots=True)
class _Term:
    """What keeping a candidate does.

    Attributes:
        member: What stands for it in a set.
        gain: The squared error that it takes away.
        cost: What it costs.
        keeps: What it keeps in fp32.
    """

    member: str
    gain: float
    cost: float
    keeps: Work


def _terms(
    candidates: Sequence[Candidate],
    effects: Mapping[str, float],
    kept: Kept,
    seen: Mapping[str, Seen],
) -> list[_Term]:
    all_flops = sum(each.flops for each in candidates) or 1
    all_bytes = sum(each.bytes for each in candidates) or 1
    found = []
    for each in candidates:
        member = following(each.name) if following(each.name) in kept else each.name
        flops, count = low_parts(each, frozenset({member}), seen)
        share = each.flops * (1 - flops) / all_flops + each.bytes * (1 - count) / all_bytes
        gain = effects[each.name] * (1 - count if member != each.name else 1)
        found.append(_Term(member, gain, _cost_of_member(each, kept, seen), Work(share, 1)))
    return found


def calibrated(
    candidates: Sequence[Candidate], outcomes: Mapping[Kept, Outcome], tolerance: float
) -> dict[str, float]:
    """Returns the squared error that each candidate adds in low precision.

    These are the squared scores, multiplied so that those of what was in low precision together come to
    the squared error that was measured, as nearly as the measurements agree.
    """
    effects = {each.name: _first_guess(each, tolerance) for each in candidates}
    measured = []
    for kept, outcome in outcomes.items():
        parts = [(each.name, low_parts(each, kept, outcome.seen)[1]) for each in candidates]
        low = [(name, part) for name, part in parts if part > 0]
        error = outcome.error
        clipped = min(error, _CLIPPED * tolerance) if not math.isnan(error) else math.inf
        if low:
            measured.append((low, max(clipped, 1e-3 * tolerance) ** 2))
    for rate, rounds in _FITTING:
        for _ in range(rounds):
            furthest = 1.0
            for low, square in measured:
                ratio = square / sum([effects[name] * part for name, part in low])
                furthest = max(furthest, ratio, 1 / ratio)
                factor = min(max(ratio, 0.05), 20.0)
                for name, part in low:
                    effects[name] *= factor ** (rate * part)
            if furthest < _AGREES:
                return effects
    return effects


def _first_guess(candidate: Candidate, tolerance: float) -> float:
    least = _UNKNOWN if candidate.is_hard or candidate.is_unseen else _NO_EFFECT
    return max((candidate.score or 0.0) ** 2, least * tolerance**2)


def _cheapest(
    terms: Sequence[_Term],
    *,
    needed: float,
    below: float,
    fixed: Kept,
    most: Work,
    is_new: Callable[[Kept], bool],
) -> Kept | None:
    """Returns the cheapest set that takes away so much of the squared error as is ``needed``.

    None if none costs less than ``below``. By branch and bound: those that take most away for their cost
    are kept first.
    """
    free = [each for each in terms if each.member not in fixed]
    free.sort(key=lambda each: (-each.gain / each.cost, each.member))
    stays = [each for each in terms if each.member in fixed]
    chosen: list[str] = []
    best: list[Kept] = []
    limit, branches = below, 0

    def least_cost(index: int, needed: float) -> float:
        """Returns a bound: the cost if parts of candidates could be kept."""
        total = 0.0
        while needed > 0:
            if index == len(free):
                return math.inf
            each = free[index]
            if each.gain >= needed:
                return total + each.cost * needed / each.gain
            total, needed, index = total + each.cost, needed - each.gain, index + 1
        return total

    def branch(index: int, needed: float, so_far: float, keeps: Work) -> None:
        nonlocal limit, branches
        branches += 1
        if branches > _MOST_BRANCHES or so_far + least_cost(index, needed) >= limit:
            return
        if not keeps.is_within(most):
            return
        if needed <= 0 and is_new(fixed.union(chosen)):
            limit = so_far
            best.append(fixed.union(chosen))
            return
        if index == len(free):
            return
        each = free[index]
        chosen.append(each.member)
        branch(index + 1, needed - each.gain, so_far + each.cost, keeps.plus(each.keeps))
        chosen.pop()
        branch(index + 1, needed, so_far, keeps)

    keeps = Work(0.0, 0)
    for each in stays:
        keeps = keeps.plus(each.keeps)
    gained = sum(each.gain for each in stays)
    branch(0, needed - gained, sum(each.cost for each in stays), keeps)
    return best[-1] if best else None


def _is_new(kept: Kept, outcomes: Mapping[Kept, Outcome], tolerance: float) -> bool:
    """Whether a set was not measured, and is within none that has clearly failed."""
    return kept not in outcomes and not any(
        not outcome.error <= _CLEARLY * tolerance and is_within(kept, each)
        for each, outcome in outcomes.items()
    )
