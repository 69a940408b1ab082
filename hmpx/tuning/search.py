"""The search for the smallest set to keep in fp32, as a pure generator.

It yields what it wants evaluated and is sent what came of it; all that it decides depends on this alone.
So a journal replays it, and however many processes evaluate, the result is the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from .asking import Ask, Asking, Search, noted
from .bounds import Work
from .candidates import Candidate, Kept, bare
from .evaluation import Outcome
from .exchanging import cost, cost_of, exchanges
from .lowering import lowered
from .minimal import minimal
from .passing import passing
from .shipped import best_shipped, kept_in_fp32

#: Where all in low precision is off by no more than so many tolerances, what leaves the range does little
#: harm, as masks of the smallest float32: its effect is not known, but it need not be kept.
_HARMLESS: Final = 10.0

#: How many exchanges may fail.
_MOST_FAILURES: Final = 5

#: Exchanges end where a search has asked for so many sets more than there are candidates, or for these
#: many, unless one promises to bring so much of the model's work into low precision.
_MORE_THAN_CANDIDATES: Final = 8
_FEW, _MANY = 14, 38
_MUCH: Final = 0.05


def search(
    candidates: Sequence[Candidate], tolerance: float, shipped: Iterable[Kept] = ()
) -> Search:
    """Yields what to evaluate, and returns a set within the tolerance that is 1-minimal.

    That is: no single member can be taken out of it. The set of all candidates is known to pass. Of the
    sets that pass it is one that costs little: members that keep much work in fp32 have been exchanged for
    others, where effects as calibrated by all errors so far promise that.

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
    hard = frozenset(each.name for each in ordered if each.is_hard)
    error = yield Ask(frozenset(), "all low", (hard,) if hard else ())
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
    kept = yield from _without_the_dearest(ordered, kept, tolerance)
    best = yield from best_shipped(ordered, kept, shipped, outcomes, tolerance)
    reserve = 1.3
    if best.kept is not None:
        kept = yield from lowered(ordered, best.kept, outcomes, tolerance)
        reserve = 0.5  # of what a list keeps without need, most is out by now
    kept = yield from _exchanged(
        ordered, kept, outcomes, tolerance, reserve=reserve, most=best.most
    )
    kept = yield from lowered(ordered, kept, outcomes, tolerance)
    kept = yield from minimal(ordered, kept, tolerance)
    if best.kept is not None:
        yield Ask(
            kept, "shipped"
        )  # it may compute the same as a shipped set, and not be evaluated yet
    return kept


def search_in_time(candidates: Sequence[Candidate], tolerance: float) -> Search:
    """Yields what to evaluate, and returns a set within the tolerance that takes little time.

    What is no faster in low precision stays in fp32; of all else no single member can be taken out.
    """
    free = frozenset(each.name for each in candidates if each.is_free)
    if not free:
        return (yield from search(candidates, tolerance))
    yield Ask(frozenset(), "all low", (free,))
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


def _without_the_dearest(
    candidates: Sequence[Candidate], kept: Kept, tolerance: float
) -> Asking[Kept]:
    """Yields what to evaluate, and returns a set that passes and costs no more than ``kept``.

    Where one member costs more than all that is in low precision, one evaluation with that alone in low
    precision tells whether it could be: if so the others are pruned later, else it stays for good.
    """
    members = [each for each in candidates if each.name in kept]
    dearest = max(members, key=lambda each: (cost(each), each.name))
    others = frozenset(each.name for each in candidates) - {dearest.name}
    if dearest.is_hard or cost_of(candidates, others) >= cost_of(candidates, kept):
        return kept
    error = yield Ask(others, "exchange")
    return others if error <= tolerance else kept


def _exchanged(
    candidates: Sequence[Candidate],
    kept: Kept,
    outcomes: Mapping[Kept, Outcome],
    tolerance: float,
    *,
    reserve: float,
    most: Work,
) -> Asking[Kept]:
    """Yields what to evaluate, and returns a set that passes and costs no more than ``kept``.

    ``most`` is what a set may keep, and ``reserve`` how many evaluations are left for each member, to make
    the set minimal.
    """
    enough = min(_MANY, max(_FEW, len(candidates) + _MORE_THAN_CANDIDATES))
    hard = {each.name for each in candidates if each.is_hard}
    failures = 0
    while failures < _MOST_FAILURES:
        fixed = frozenset(
            each
            for each in kept
            if not math.isfinite(
                outcomes[kept - {each}].error
                if kept - {each} in outcomes
                else math.inf
                if bare(each) in hard
                else 0.0
            )
        )
        found = exchanges(candidates, outcomes, kept, fixed, tolerance, most=most)
        is_late = len(outcomes) + reserve * len(kept) >= enough
        if not found or (is_late and found[0].promise < _MUCH):
            break
        first, *others = [each.kept for each in found]
        error = yield Ask(first, "exchange", tuple(others))
        if error <= tolerance and kept_in_fp32(candidates, first, outcomes).is_within(most):
            kept = first
        else:
            failures += 1  # or what follows is given less in low precision than it was
    return kept
