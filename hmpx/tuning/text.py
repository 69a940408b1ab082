"""A result as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..errors import cut
from .candidates import Candidate
from .evaluation import Evaluation

if TYPE_CHECKING:
    from .result import Tuned


def text(tuned: Tuned) -> str:
    """Returns the verdict, what is kept and why, and the path of the search."""
    parts = [verdict(tuned)]
    if tuned.keep_fp32:
        parts.append(aligned([KEPT_TITLES, *kept_rows(tuned)]))
    parts.append(aligned([PATH_TITLES, *path_rows(tuned.path)]))
    return "\n\n".join(parts)


def verdict(tuned: Tuned) -> str:
    """Returns what was found, in a few sentences."""
    count, low = len(tuned.keep_fp32), tuned.low_precision_type
    kept = (
        f"Nothing has to stay in fp32 beside {low}"
        if not count
        else f"{count} of {len(tuned.candidates)} candidates stay in fp32 beside {low}"
    )
    lines = [
        f"{kept}: {tuned.metric} error {shown(tuned.error)}, tolerance {shown(tuned.tolerance)}, "
        f"all in {low} {shown(tuned.all_low_error)}.",
        f"In {low}: {tuned.low_precision_flops_share:.1%} of FLOPs, "
        f"{tuned.low_precision_bytes_share:.1%} of bytes. {tuned.evaluations} evaluations.",
    ]
    if tuned.fresh_error is not None:
        lines.append(f"On inputs that the search has not seen: error {shown(tuned.fresh_error)}.")
    if tuned.is_complete:
        if count:
            lines.append("None of these can be taken out: without it the error is too large.")
    else:
        why = {"budget": "the budget was spent", "interrupt": "it was interrupted"}
        lines.append(
            f"The search did not end, since {why.get(tuned.stopped_by, tuned.stopped_by)}: this is the "
            "best set so far."
        )
    return "\n".join(lines)


KEPT_TITLES = ("kept in fp32", "effect", "rank", "error without it", "FLOPs", "bytes")


def kept_rows(tuned: Tuned) -> list[tuple[str, ...]]:
    """Returns a row for each kept candidate, the one with the largest effect first."""
    known = {each.name: each for each in tuned.candidates}
    members = [known[name] for name in tuned.keep_fp32]
    members.sort(key=lambda each: (not each.is_hard, -(each.score or 0.0), each.name))
    flops = max(1, sum(each.flops for each in tuned.candidates))
    count = max(1, sum(each.bytes for each in tuned.candidates))
    return [
        (
            cut(each.name),
            effect(each),
            rank(each, tuned.candidates),
            shown(tuned.error_without(each.name)),
            f"{each.flops / flops:.1%}",
            f"{each.bytes / count:.1%}",
        )
        for each in members
    ]


PATH_TITLES = ("", "phase", "in fp32", "error", "")


def path_rows(path: Sequence[Evaluation]) -> list[tuple[str, ...]]:
    """Returns a row for each evaluation."""
    return [
        (
            str(number),
            each.phase,
            names(each.kept),
            shown(each.error),
            "passes" if each.passed else "fails",
        )
        for number, each in enumerate(path, 1)
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


def shown(value: float | None) -> str:
    """Returns a number with three digits."""
    if value is None:
        return "not tried"
    return "not finite" if math.isinf(value) else f"{value:.3g}"


def aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """Returns rows as a table of text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
