"""A result as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from ..errors import cut, lined
from .assignment import FP32
from .candidates import FOLLOWS, Candidate, bare, is_following, low_parts, shares

#: The metric of a command, which passes or fails.
CHECK: Final = "check"

if TYPE_CHECKING:
    from .result import Tuned


def text(tuned: Tuned) -> str:
    """Returns the verdict, what is kept and why, and the path of the search."""
    parts = [verdict(tuned)]
    if tuned.kept:
        parts.append(aligned([KEPT_TITLES, *kept_rows(tuned)]))
    parts.append(aligned([PATH_TITLES, *path_rows(tuned)]))
    return "\n\n".join(parts)


def verdict(tuned: Tuned) -> str:
    """Returns what was found, in a few sentences."""
    count, low = len(tuned.kept), tuned.low_precision_type
    stay = "in wider types" if any(map(_is_wider, tuned.kept)) else "in fp32"
    kept = (
        f"Nothing has to stay in fp32 beside {low}"
        if not count
        else f"{count} of {len(tuned.candidates)} candidates stay {stay} beside {low}"
    )
    if tuned.follows:
        kept += f", {len(tuned.follows)} of them in calls that are given fp32"
    if tuned.metric == CHECK:
        of_all = "passes" if tuned.all_low_error == 0 else "fails"
        said = f"the check passes; all in {low} it {of_all}."
    else:
        said = (
            f"{tuned.metric} error {shown(tuned.error)}, tolerance {shown(tuned.tolerance)}, "
            f"all in {low} {shown(tuned.all_low_error)}."
        )
    lines = [
        f"{kept}: {said}",
        f"{_shares(tuned)}. {tuned.evaluations} evaluations.",
    ]
    if tuned.time_share is not None:
        lines.append(
            f"Ops take {tuned.time_share:.2f} of their time in fp32, as measured one by one."
        )
    if tuned.limit:
        lines.append(f"The choice with the least predicted error of those with {tuned.limit}.")
    if tuned.fresh_error is not None:
        lines.append(f"On inputs that the search has not seen: error {shown(tuned.fresh_error)}.")
    if tuned.is_complete:
        failing = "the check fails" if tuned.metric == CHECK else "the error is too large"
        free = {each.name for each in tuned.candidates if each.is_free} & tuned.kept
        if free:
            lines.append(f"No faster in {low}: {names(free, 10)}.")
        if count > len(free) and not tuned.limit:
            which = "the others" if free else "these"
            if tuned.searched is not None:
                failing += (
                    f" for {shown(tuned.searched)}, which was searched for since a set within the tolerance "
                    "failed on fresh inputs"
                )
            lines.append(f"None of {which} can be taken out: without it {failing}.")
    else:
        why = {
            "budget": "the budget was spent",
            "interrupt": "it was interrupted",
            "fresh inputs": "each smaller set that it found failed on fresh inputs",
        }
        lines.append(
            f"The search did not end, since {why.get(tuned.stopped_by, tuned.stopped_by)}: this is the "
            "best set so far."
        )
    return lined(lines)


def _is_wider(member: str) -> bool:
    return bare(member) != member and not is_following(member)


def _shares(tuned: Tuned) -> str:
    """Returns the shares of FLOPs and bytes in each type below fp32."""
    types, found = tuned.types, []
    for name in dict.fromkeys([tuned.low_precision_type, *sorted(set(types.values()))]):
        if name in (FP32, FOLLOWS):
            continue
        others = {each.name for each in tuned.candidates if types[each.name] not in (name, FOLLOWS)}
        followed = {each for each in tuned.kept if is_following(each)}
        flops, count = shares(tuned.candidates, frozenset(others | followed), tuned.seen)
        found.append(f"In {name}: {flops:.1%} of FLOPs, {count:.1%} of bytes")
    return "; ".join(found)


KEPT_TITLES = ("kept", "effect", "rank", "error without it", "FLOPs", "bytes")


def kept_rows(tuned: Tuned) -> list[tuple[str, ...]]:
    """Returns a row for each kept candidate, the one with the largest effect first."""
    known = {each.name: each for each in tuned.candidates}
    pairs = [(known[bare(name)], name) for name in tuned.kept]
    pairs.sort(key=lambda each: (not each[0].is_hard, -(each[0].score or 0.0), each[1]))
    flops = max(1, sum(each.flops for each in tuned.candidates))
    count = max(1, sum(each.bytes for each in tuned.candidates))
    rows: list[tuple[str, ...]] = []
    for each, name in pairs:
        low_flops, low_bytes = low_parts(each, tuned.kept, tuned.seen)
        rows.append(
            (
                f"{cut(each.name)} follows" if is_following(name) else cut(name),
                effect(each),
                rank(each, tuned.candidates),
                error_text(tuned, tuned.error_without(name)),
                f"{each.flops * (1 - (low_flops if is_following(name) else 0)) / flops:.1%}",
                f"{each.bytes * (1 - (low_bytes if is_following(name) else 0)) / count:.1%}",
            )
        )
    return rows


PATH_TITLES = ("", "phase", "kept", "error", "")


def path_rows(tuned: Tuned) -> list[tuple[str, ...]]:
    """Returns a row for each evaluation."""
    return [
        (
            str(number),
            each.phase,
            names(each.kept),
            error_text(tuned, each.error),
            "" if tuned.metric == CHECK else "passes" if each.passed else "fails",
        )
        for number, each in enumerate(tuned.path, 1)
    ]


def names(kept: Iterable[str], most: int = 4) -> str:
    """Returns the first names of a set, and how many more there are."""
    found = sorted(kept)
    shown_names = ", ".join(map(cut, found[:most])) or "nothing"
    return f"{shown_names} and {len(found) - most} more" if len(found) > most else shown_names


def effect(candidate: Candidate) -> str:
    """Returns a candidate's effect, in words where it has none."""
    if candidate.is_hard:
        return "out of range"
    if candidate.is_unseen and not candidate.score:
        return "no gradient"
    return "not known" if candidate.score is None else shown(candidate.score)


def rank(candidate: Candidate, candidates: Sequence[Candidate]) -> str:
    """Returns the rank of a candidate by effect; ``""`` if that is not known."""
    if candidate.score is None:
        return ""
    better = sum(
        (each.is_hard, each.score or 0.0) > (candidate.is_hard, candidate.score)
        for each in candidates
    )
    return str(better + 1)


def error_text(tuned: Tuned, value: float | None) -> str:
    """Returns an error, or the verdict of a check."""
    if tuned.metric != CHECK or value is None:
        return shown(value)
    return "passes" if value == 0 else "fails"


def shown(value: float | None) -> str:
    """Returns an error with three digits."""
    if value is None:
        return "not tried"
    return "not finite" if math.isinf(value) else f"{value:.3g}"


def aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """Returns rows as a table of text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return lined(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
