"""Makes a set that passes minimal: the proof that none of its members can be taken out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .asking import Ask, Asking
from .candidates import Candidate, Kept, bare

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
        larger = trial - set(names[after : after + 2 * block])
        smaller = kept - set(part[: len(part) // 2])
        singles = [kept - {name} for name in names[start + 1 : start + _MOST_AHEAD]]
        others = dict.fromkeys([larger, *(singles if len(part) == 1 else [smaller])])
        ahead = tuple(each for each in others if each not in (trial, kept))
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
