"""Exchanges: sets that cost less than the one at hand and may pass, by effects calibrated on what was measured.

Pure arithmetic on candidates and errors; it evaluates nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from .candidates import Candidate, Kept

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

#: Most branches that are looked at for one set.
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


def cost_of(candidates: Sequence[Candidate], kept: Kept) -> float:
    """Returns what keeping a set costs."""
    return sum(cost(each) for each in candidates if each.name in kept)


def exchanges(
    candidates: Sequence[Candidate],
    errors: Mapping[Kept, float],
    kept: Kept,
    fixed: Kept,
    tolerance: float,
) -> list[Exchange]:
    """Returns sets to try in place of ``kept``, the most promising first; none if none is worth it.

    Args:
        candidates: What may be kept.
        errors: What was measured.
        kept: The set at hand, which passes.
        fixed: Its members that are not exchanged.
        tolerance: The largest error that passes.
    """
    effects = calibrated(candidates, errors, tolerance)
    now = cost_of(candidates, kept)
    found: dict[Kept, Exchange] = {}
    for margin in _MARGINS:
        tried = _cheapest(
            candidates,
            effects,
            most=margin * tolerance**2,
            below=now - _LEAST,
            fixed=fixed,
            errors=errors,
            tolerance=tolerance,
        )
        if tried is None or tried in found:
            continue
        rest = sum(effects[each.name] for each in candidates if each.name not in tried)
        off = math.log(max(rest, 1e-300) / tolerance**2) / _WIDTH
        chance = 1 / (1 + math.exp(min(off, 500.0)))
        found[tried] = Exchange(tried, (now - cost_of(candidates, tried)) * chance)
    worth = [each for each in found.values() if each.promise >= _LEAST]
    return sorted(worth, key=lambda each: (-each.promise, sorted(each.kept)))


def calibrated(
    candidates: Sequence[Candidate], errors: Mapping[Kept, float], tolerance: float
) -> dict[str, float]:
    """Returns the squared error that each candidate adds in low precision.

    These are the squared scores, multiplied so that those of what was in low precision together come to
    the squared error that was measured, as nearly as the measurements agree.
    """
    effects = {each.name: _first_guess(each, tolerance) for each in candidates}
    measured = []
    for kept, error in errors.items():
        low = [name for name in effects if name not in kept]
        clipped = min(error, _CLIPPED * tolerance) if not math.isnan(error) else math.inf
        if low:
            measured.append((low, max(clipped, 1e-3 * tolerance) ** 2))
    for rate, rounds in _FITTING:
        for _ in range(rounds):
            furthest = 1.0
            for low, square in measured:
                ratio = square / sum([effects[name] for name in low])
                furthest = max(furthest, ratio, 1 / ratio)
                factor = min(max(ratio, 0.05), 20.0) ** rate
                for name in low:
                    effects[name] *= factor
            if furthest < _AGREES:
                return effects
    return effects


def _first_guess(candidate: Candidate, tolerance: float) -> float:
    least = _UNKNOWN if candidate.is_hard or candidate.is_unseen else _NO_EFFECT
    return max((candidate.score or 0.0) ** 2, least * tolerance**2)


def _cheapest(
    candidates: Sequence[Candidate],
    effects: Mapping[str, float],
    *,
    most: float,
    below: float,
    fixed: Kept,
    errors: Mapping[Kept, float],
    tolerance: float,
) -> Kept | None:
    """Returns the cheapest set beside which effects are predicted to come to no more than ``most``.

    None if none costs less than ``below``. Not a set that was measured, nor a part of one that failed.
    By branch and bound: those that take most away for their cost are kept first.
    """
    free = [each for each in candidates if each.name not in fixed]
    free.sort(key=lambda each: (-effects[each.name] / cost(each), each.name))
    gains, costs = [effects[each.name] for each in free], [cost(each) for each in free]
    failed = [kept for kept, error in errors.items() if not error <= _CLEARLY * tolerance]
    chosen: list[str] = []
    best: list[Kept] = []
    limit, branches = below, 0

    def least_cost(index: int, needed: float) -> float:
        """Returns a bound: the cost if parts of candidates could be kept."""
        total = 0.0
        while needed > 0:
            if index == len(free):
                return math.inf
            if gains[index] >= needed:
                return total + costs[index] * needed / gains[index]
            total, needed, index = total + costs[index], needed - gains[index], index + 1
        return total

    def branch(index: int, needed: float, so_far: float) -> None:
        nonlocal limit, branches
        branches += 1
        if branches > _MOST_BRANCHES or so_far + least_cost(index, needed) >= limit:
            return
        if needed <= 0 and _is_new(fixed.union(chosen), errors, failed):
            limit = so_far
            best.append(fixed.union(chosen))
            return
        if index == len(free):
            return
        chosen.append(free[index].name)
        branch(index + 1, needed - gains[index], so_far + costs[index])
        chosen.pop()
        branch(index + 1, needed, so_far)

    branch(0, sum(gains) - most, cost_of(candidates, fixed))
    return best[-1] if best else None


def _is_new(kept: Kept, errors: Mapping[Kept, float], failed: Collection[Kept]) -> bool:
    return kept not in errors and not any(kept <= each for each in failed)
