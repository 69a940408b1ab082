"""The search for the smallest set to keep in fp32, as pure generators.

They yield what they want evaluated and are sent what came of it; all that they decide depends on this alone.
So a journal replays a search, and however many processes evaluate, the result is the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from .asking import Ask, Asking, Outcome, Search, noted
from .candidates import Candidate, Kept, bare, cost
from .lowering import calibrated, lowered
from .shipped import best_shipped

#: Where all in low precision is off by no more than so many tolerances, what leaves the range does little
#: harm, as masks of the smallest float32: its effect is not known, but it need not be kept.
_HARMLESS: Final = 10.0

#: How often candidates are ranked anew.
_MOST_RANKINGS: Final = 4


def search(
    candidates: Sequence[Candidate], tolerance: float, shipped: Iterable[Kept] = ()
) -> Search:
    """Yields what to evaluate, and returns a set within the tolerance that is 1-minimal.

    That is: no single member can be taken out of it. The set of all candidates is known to pass.

    Args:
        candidates: What may be kept.
        tolerance: The largest error that passes.
        shipped: The sets that shipped lists keep. If one passes, what is returned has no less in low
            precision, in the sum of the shares of FLOPs and of bytes.
    """
    ordered = sorted(candidates, key=lambda each: each.name)
    outcomes: dict[Kept, Outcome] = {}
    return (yield from noted(_search(ordered, tolerance, tuple(shipped), outcomes), outcomes))


def _search(
    ordered: Sequence[Candidate],
    tolerance: float,
    shipped: tuple[Kept, ...],
    outcomes: dict[Kept, Outcome],
) -> Asking[Kept]:
    if not ordered:
        return frozenset()
    error = yield Ask(frozenset(), "all low")
    if error <= tolerance:
        return frozenset()
    if error <= _HARMLESS * tolerance:
        ordered = [
            replace(each, is_hard=False, is_unseen=each.is_unseen or each.is_hard)
            for each in ordered
        ]
    kept = yield from passing(ordered, error, tolerance)
    if all(each.score is None for each in ordered):
        return (yield from minimal(ordered, kept, tolerance))
    best = yield from best_shipped(ordered, kept, shipped, outcomes, tolerance)
    if best is not None:
        kept = best
    else:
        kept = yield from _ranked_anew(ordered, kept, outcomes, tolerance)
    kept = yield from lowered(ordered, kept, outcomes, tolerance)
    kept = yield from minimal(ordered, kept, tolerance)
    if best is not None:
        # It may compute the same as a shipped set, and not be evaluated yet.
        yield Ask(kept, "shipped")
    return kept


def _ranked_anew(
    candidates: Sequence[Candidate],
    kept: Kept,
    outcomes: Mapping[Kept, Outcome],
    tolerance: float,
) -> Asking[Kept]:
    """Yields what to evaluate, and returns a set that passes and costs no more than ``kept``.

    That is a prefix once more, of the ranking by effects as all errors so far say, without what is predicted
    not to be needed, the dearest first.
    """
    costs = {each.name: cost(each) for each in candidates}
    for _ in range(_MOST_RANKINGS):
        effects = calibrated(candidates, outcomes, tolerance)
        rest = sum(effects.values())
        trial: set[str] = {each.name for each in candidates if each.is_hard}
        rest -= sum(effects[name] for name in trial)
        for name in sorted(effects, key=lambda name: (-effects[name] / costs[name], name)):
            if rest > tolerance**2 and name not in trial:
                trial, rest = trial | {name}, rest - effects[name]
        for name in sorted(trial, key=lambda name: (-costs[name], name)):
            if rest + effects[name] <= tolerance**2:
                trial, rest = trial - {name}, rest + effects[name]
        found = frozenset(trial)
        if found in outcomes or sum(costs[n] for n in found) >= sum(costs[n] for n in kept):
            break
        if (yield Ask(found, "prefix")) <= tolerance:
            kept = found
    return kept


def search_in_time(candidates: Sequence[Candidate], tolerance: float) -> Search:
    """Yields what to evaluate, and returns a set within the tolerance that takes little time.

    What is no faster in low precision stays in fp32; of all else no single member can be taken out.
    """
    free = frozenset(each.name for each in candidates if each.is_free)
    if not free:
        return (yield from search(candidates, tolerance))
    yield Ask(frozenset(), "all low")
    asking = search([each for each in candidates if not each.is_free], tolerance)
    try:
        asked = next(asking)
        while True:
            ahead = tuple(free | each for each in asked.ahead)
            phase = asked.phase if asked.kept else "free"
            asked = asking.send((yield Ask(free | asked.kept, phase, ahead)))
    except StopIteration as done:
        others: Kept = done.value
        return free | others


#: Candidates whose predicted errors together are below this share of the tolerance come last.
_NEGLIGIBLE: Final = 0.3

#: What no gradient arrives at is harmless if the error with nothing else in low precision is below this
#: share of the tolerance; else it is kept like what leaves the range, until it is pruned.
_UNFELT: Final = 0.3


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
        if not others or (yield Ask(others, "unseen")) > _UNFELT * tolerance:
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
        else:
            guess = _length_by_both(predicted, (low, high), errors, tolerance)
            if step:  # once, then by halves unless it closes in
                step = 0
            elif guess not in (low + 1, high - 1) or high - low > 4:
                guess = (low + high) // 2
        guess = min(max(guess, low + 1), high - 1)
        errors[guess] = yield Ask(kept(guess), "prefix")
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


#: How many sets are named at most that may be asked for next.
_MOST_AHEAD: Final = 8


def minimal(candidates: Sequence[Candidate], kept: Kept, tolerance: float) -> Asking[Kept]:
    """Yields what to evaluate, and returns a 1-minimal part of a set that passes.

    Blocks that get larger as long as they are not needed are taken out first: of what left the range, as
    masks of the smallest float32 do without harm, and of what has no effect that is known, then the weakest.
    Each one taken out late has those before tried anew. Then single members, the dearest first, until none can be taken out.
    """
    member = {bare(each): each for each in kept}
    members = [each for each in candidates if each.name in member]
    weakest = sorted(
        members,
        key=lambda each: (
            not each.is_hard,
            not each.is_unseen,
            each.score or -each.prior,
            -each.benefit,
            each.name,
        ),
    )
    names = [member[each.name] for each in weakest]
    needed: set[str] = set()
    start, block = 0, 1
    while start < len(names):
        part = names[start : start + block]
        trial, after = kept - set(part), start + len(part)
        ahead = tuple(kept - {name} for name in names[start + 1 : start + _MOST_AHEAD])
        error = yield Ask(trial, "prune", ahead)
        if error <= tolerance:
            kept, needed = trial, set()
            start, block = after, 2 * block
        elif len(part) == 1:
            needed.add(part[0])
            start, block = start + 1, 1
        else:
            block = len(part) // 2
    dearest = sorted(members, key=lambda each: (-each.benefit, each.name))
    order = [member[each.name] for each in dearest]
    while left := [each for each in order if each in kept - needed]:
        ahead = tuple(kept - {name} for name in left[1 : _MOST_AHEAD + 1])
        error = yield Ask(kept - {left[0]}, "sweep", ahead)
        if error <= tolerance:
            kept, needed = kept - {left[0]}, set()
        else:
            needed.add(left[0])
    return kept
