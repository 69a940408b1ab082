"""Lowers members of a set that passes, by what errors so far say of each: out of the set, or to follow their inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from .asking import Ask, Asking, Outcome, Seen, low_parts
from .candidates import Candidate, Kept, bare, cost, following, is_within

#: How many sets may fail until what is left is left to the proof.
_MOST_FAILURES: Final = 2

#: To follow its inputs a member has to bring so much of the model's work into low precision.
_LEAST: Final = 0.002


#: By how much squared errors may be predicted above the squared tolerance where a single member follows.
_MARGIN: Final = 3.0


#: Errors beyond so many tolerances tell no more than that they are too large.
_CLIPPED: Final = 10.0

#: Squared effects, in squared tolerances, that are assumed where none is known, or where it is 0.
_UNKNOWN: Final = 0.3**2
_NO_EFFECT: Final = 0.02**2

#: How fast effects are fitted to errors: a rate, and how often all errors are gone through.
_FITTING: Final = ((0.7, 30), (0.3, 20))

#: Predicted and measured squared errors that differ by less agree.
_AGREES: Final = 1.002


class _Move(NamedTuple):
    """A member that is lowered.

    Attributes:
        harm: The squared error that this adds.
        gain: What it saves.
        member: The member, and
        lowered: what takes its place: nothing, or that it follows its inputs.
    """

    harm: float
    gain: float
    member: str
    lowered: Kept


def lowered(
    candidates: Sequence[Candidate],
    kept: Kept,
    outcomes: Mapping[Kept, Outcome],
    tolerance: float,
) -> Asking[Kept]:
    """Yields what to evaluate, and returns a set that passes, within ``kept``.

    First members are taken out, then of those that are left some follow their inputs: as many at once as are
    predicted to pass, by effects that are calibrated anew after each error.
    """
    for moves_of, phase in ((_removals, "prune"), (_loosenings, "follow")):
        failures = 0
        while failures < _MOST_FAILURES:
            seen = outcomes[kept].seen if kept in outcomes else {}
            effects = calibrated(candidates, outcomes, tolerance)
            moves = list(moves_of(candidates, kept, seen, effects))
            rest = sum(effects[each.name] * low_parts(each, kept, seen)[1] for each in candidates)
            trial = _lowered_by(moves, kept, outcomes, tolerance, rest)
            if trial == kept:
                break
            error = yield Ask(trial, phase)
            if error <= tolerance:
                kept = trial
            else:
                failures += 1
    return kept


def _removals(
    candidates: Sequence[Candidate],
    kept: Kept,
    seen: Mapping[str, Seen],
    effects: Mapping[str, float],
) -> Iterator[_Move]:
    """Yields what taking each member out does, but for those whose values leave the range."""
    for member, each in _members(candidates, kept):
        if not each.is_hard:
            wide = 1 - low_parts(each, kept, seen)[1]
            yield _Move(effects[each.name] * wide, cost(each), member, frozenset())


def _loosenings(
    candidates: Sequence[Candidate],
    kept: Kept,
    seen: Mapping[str, Seen],
    effects: Mapping[str, float],
) -> Iterator[_Move]:
    """Yields what it does if a member in fp32 follows its inputs.

    Only of those of whose calls some are given low precision alone, and some are not: if all calls are of one
    kind it makes no difference, or that of taking the member out.
    """
    for member, each in _members(candidates, kept):
        given = seen[each.name].given if member == each.name and each.name in seen else 0.0
        if given < 1 and each.benefit * given >= _LEAST:
            gain, harm = each.benefit * given, effects[each.name] * given
            yield _Move(harm, gain, member, frozenset({following(each.name)}))


def _members(candidates: Sequence[Candidate], kept: Kept) -> Iterator[tuple[str, Candidate]]:
    member = {bare(each): each for each in kept}
    return ((member[each.name], each) for each in candidates if each.name in member)


def _lowered_by(
    moves: Sequence[_Move],
    kept: Kept,
    outcomes: Mapping[Kept, Outcome],
    tolerance: float,
    rest: float,
) -> Kept:
    """Returns the set after as many moves as are predicted to pass; ``kept`` if there are none.

    Those that harm least for what they gain go first. Nothing that is within a set that failed. If that leaves
    none, the one that gains most of those that let a member follow, if it is predicted to fail by little.
    """
    trial = kept
    hopeful = []
    for each in sorted(moves, key=lambda each: (each.harm / each.gain, each.member)):
        if _is_hopeless(further := trial - {each.member} | each.lowered, outcomes, tolerance):
            continue
        if rest + each.harm <= tolerance**2:
            trial, rest = further, rest + each.harm
        elif each.lowered and rest + each.harm <= _MARGIN * tolerance**2:
            hopeful.append(each)
    if trial == kept and hopeful:
        best = max(hopeful, key=lambda each: (each.gain, each.member))
        trial = kept - {best.member} | best.lowered
    return trial


def _is_hopeless(kept: Kept, outcomes: Mapping[Kept, Outcome], tolerance: float) -> bool:
    """Whether more than this was kept once, and not enough."""
    return any(
        not outcome.error <= tolerance and is_within(kept, other)
        for other, outcome in outcomes.items()
    )


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
