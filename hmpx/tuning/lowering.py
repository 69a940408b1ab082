"""Lowers members of a set that passes, by what errors so far say of each: out of the set, or to follow their inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from .asking import Ask, Asking, Outcome, Seen, low_parts
from .bounds import is_within
from .candidates import Candidate, Kept, bare, following
from .exchanging import calibrated, cost

#: How many sets may fail until what is left is left to the proof.
_MOST_FAILURES: Final = 2

#: How many sets are named at most that may be asked for next.
_MOST_AHEAD: Final = 8

#: To follow its inputs a member has to bring so much of the model's work into low precision.
_LEAST: Final = 0.002


#: By how much squared errors may be predicted above the squared tolerance where a single member follows.
_MARGIN: Final = 3.0


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
            error = yield Ask(trial, phase, _ahead(moves, trial))
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


def _ahead(moves: Sequence[_Move], trial: Kept) -> tuple[Kept, ...]:
    """Returns sets that may be tried next: beyond the trial, with those that were not lowered yet in their order.

    An error that passes makes effects smaller than they were predicted to be, and hardly changes their order.
    """
    further = trial
    found: list[Kept] = []
    for each in sorted(moves, key=lambda each: (each.harm / each.gain, each.member)):
        if each.member in further and len(found) < _MOST_AHEAD:
            further = further - {each.member} | each.lowered
            found.append(further)
    return tuple(found)


def _is_hopeless(kept: Kept, outcomes: Mapping[Kept, Outcome], tolerance: float) -> bool:
    """Whether more than this was kept once, and not enough."""
    return any(
        not outcome.error <= tolerance and is_within(kept, other)
        for other, outcome in outcomes.items()
    )
