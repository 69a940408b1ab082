"""The way to a first set that passes: a prefix of the ranking by effect and cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from .asking import Ask, Asking
from .candidates import Candidate, Kept
from .exchanging import cost

#: Candidates whose predicted errors together are below this share of the tolerance come last.
_NEGLIGIBLE: Final = 0.3

#: What no gradient arrives at is harmless if the error with nothing else in low precision is below this
#: share of the tolerance; else it is kept like what leaves the range, until it is pruned.
_HARMLESS: Final = 0.3


def passing(ordered: Sequence[Candidate], error: float, tolerance: float) -> Asking[Kept]:
    """Yields what to evaluate, and returns a set that passes, with few members that are not needed.

    Args:
        ordered: What may be kept, by name.
        error: The error with nothing kept.
        tolerance: The largest error that passes.
    """
    hard = frozenset(each.name for each in ordered if each.is_hard)
    unseen = frozenset(each.name for each in ordered if each.is_unseen) - hard
    if unseen:
        others = frozenset(each.name for each in ordered) - unseen
        if not others or (yield Ask(others, "unseen")) > _HARMLESS * tolerance:
            hard |= unseen
    rest = [each for each in ordered if each.name not in hard]
    if hard:
        error = yield Ask(hard, "range")
    if hard and error <= tolerance:
        return hard
    scale = _scale(rest, error)
    ranking = _ranking(rest, scale, tolerance)
    length = yield from _prefix(hard, ranking, error, scale, tolerance)
    return hard | {each.name for each in ranking[:length]}


def _scale(candidates: Iterable[Candidate], error: float) -> float:
    """Returns what to multiply squared scores by so that together they are the measured error's square."""
    total = sum((each.score or 0.0) ** 2 for each in candidates)
    return error**2 / total if math.isfinite(error) and total > 0 else 0.0


def _predicted(candidate: Candidate, scale: float) -> float:
    """Returns the square of the error that computing ``candidate`` in low precision is predicted to add."""
    return (candidate.score or 0.0) ** 2 * scale


def _ranking(candidates: Sequence[Candidate], scale: float, tolerance: float) -> list[Candidate]:
    """Returns the candidates, those first that take most error away for the work that they cost.

    What together has no effect that matters comes last, whatever it costs. Without scores: as the default
    lists have them.
    """
    if all(each.score is None for each in candidates):
        return sorted(candidates, key=lambda each: (each.prior, each.benefit, each.name))
    if not scale:  # nothing to calibrate by: the error is infinite
        return sorted(candidates, key=lambda each: (-(each.score or 0.0), each.name))
    weakest = sorted(candidates, key=lambda each: (_predicted(each, scale), each.name))
    budget, count = (_NEGLIGIBLE * tolerance) ** 2, 0
    for each in weakest:
        budget -= _predicted(each, scale)
        if budget < 0:
            break
        count += 1
    strong = sorted(
        weakest[count:],
        key=lambda each: (-_predicted(each, scale) / cost(each), each.name),
    )
    return strong + weakest[:count][::-1]


def _prefix(
    hard: Kept, ranking: Sequence[Candidate], error: float, scale: float, tolerance: float
) -> Asking[int]:
    """Yields what to evaluate, and returns how many of the ranking to keep so that the rest passes.

    Gallops up from none to the first that passes, where predictions say how far, then bisects.
    """

    def kept(length: int) -> Kept:
        return hard | {each.name for each in ranking[:length]}

    predicted = [_predicted(each, scale) for each in ranking]
    low, high = 0, len(ranking)
    errors = {low: error}
    step = 1
    while high - low > 1:
        if high == len(ranking):
            guess = _length_by_failure(predicted, low, errors[low], tolerance)
            guess = max(guess, low + step)
            step *= 2
            ahead: Iterable[int] = (guess - 1, guess + step, guess - 2)
        else:
            guess = _length_by_both(predicted, (low, high), errors, tolerance)
            if step:  # once, then by halves unless it closes in
                step = 0
            elif guess not in (low + 1, high - 1) or high - low > 4:
                guess = (low + high) // 2
            ahead = (guess - 1, guess + 1, (low + guess) // 2, (guess + high) // 2)
        guess = min(max(guess, low + 1), high - 1)
        others = [each for each in dict.fromkeys(ahead) if low < each < high and each != guess]
        errors[guess] = yield Ask(kept(guess), "prefix", tuple(map(kept, others)))
        if errors[guess] <= tolerance:
            high = guess
        else:
            low = guess
    return high


def _length_by_failure(predicted: Sequence[float], low: int, error: float, tolerance: float) -> int:
    """Returns the length after which the rest is predicted to pass, calibrated on what failed at ``low``."""
    rest = sum(predicted[low:])
    if not math.isfinite(error) or rest <= 0:
        return low + 1
    scale = error**2 / rest
    for length in range(low, len(predicted)):
        if rest * scale <= tolerance**2:
            return length
        rest -= predicted[length]
    return len(predicted)


def _length_by_both(
    predicted: Sequence[float], bracket: tuple[int, int], errors: dict[int, float], tolerance: float
) -> int:
    """Returns the length that is predicted to pass, between one that failed and one that passed."""
    low, high = bracket
    between = sum(predicted[low:high])
    gained = errors[low] ** 2 - errors[high] ** 2 if high in errors else math.inf
    if not math.isfinite(gained) or between <= 0:
        return (low + high) // 2
    scale = gained / between
    error = errors[high] ** 2
    for length in range(high - 1, low, -1):
        error += predicted[length] * scale
        if error > tolerance**2:
            return min(length + 1, high - 1)
    return low + 1
