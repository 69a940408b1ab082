"""The verdict on a benchmark in words: which variant is fastest, and what that is worth."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from .variants import BASE

if TYPE_CHECKING:
    from .result import Bench, Measured

#: If a variant is as fast as another, so often it is held to be faster at most; for slower likewise.
LEVEL: Final = 1 / 64

#: With fewer runs even the same sign of all of them is not so rare.
FEWEST_RUNS: Final = 6

#: Nearer to 1 than this is equal: so much may come from a variant's place in its turn.
_EQUAL: Final = 0.01


def verdict(bench: Bench) -> str:
    """Returns which variant is fastest, how much time that saves, and which can't be told from it.

    A variant without a finite loss or output, where fp32 has one, is not the fastest, however fast.
    """
    if bench.low_op:
        return (
            f"No verdict: the row fp32 is not fp32, for in the step itself {bench.low_op}. Leave "
            "torch.autocast, hmpx.convert() and low dtypes out of the step."
        )
    others = [each for each in bench.variants if each.ratios and each.name != BASE]
    sound = [each for each in others if not _is_broken(each, bench.variants[0])]
    if not sound:
        return "Nothing to compare fp32 with."
    nearest = min(sound, key=_median)
    if len(nearest.ratios) < FEWEST_RUNS:
        runs = "1 run is" if len(nearest.ratios) == 1 else f"{len(nearest.ratios)} runs are"
        return f"{runs} too few to tell whether any differs from fp32: {FEWEST_RUNS} are the least."
    faster = [each for each in sound if each.is_other and _median(each) < 1.0]
    if faster:
        best = min(faster, key=_median)
        return " ".join([f"Fastest is {_took(best)}.", *_equals(best, sound)])
    if nearest.is_other:
        return f"None is faster than fp32. The nearest is {_took(nearest)}."
    count = sum(each < 1.0 for each in nearest.ratios)
    return (
        f"None is shown to be faster than fp32. The nearest, {_took(nearest)}, was faster in {count} of "
        f"{len(nearest.ratios)} runs, as equal ones may be."
    )


def broken(bench: Bench) -> Iterator[str]:
    """Yields which variants' results are no finite numbers."""
    for each in bench.variants:
        if each.not_finite_at is not None:
            yield f"The loss of {each.label} is NaN or infinite at step {each.not_finite_at}."
        elif _is_broken(each, bench.variants[0]):
            yield f"The output of {each.label} is NaN or infinite where that of fp32 is not."


def _is_broken(row: Measured, base: Measured) -> bool:
    if row.output_error is not None and not math.isfinite(row.output_error):
        return True
    return row.not_finite_at is not None and base.not_finite_at is None


def _equals(best: Measured, others: Sequence[Measured]) -> Iterator[str]:
    labels = [
        each.label
        for each in others
        if each is not best
        and not is_beyond_chance([a / b for a, b in zip(each.ratios, best.ratios, strict=True)])
    ]
    if labels:
        yield f"Equal to it within what runs vary: {', '.join(labels)}."


def _took(row: Measured) -> str:
    return f"{row.label}: {_median(row):.2f} of fp32's time"


def _median(row: Measured) -> float:
    return float("inf") if row.ratio is None else row.ratio.median


def is_beyond_chance(ratios: Sequence[float]) -> bool:
    """Whether the sign test tells the ratios from 1.

    Quartiles that leave out 1 do not show it: of variants that are all equal to fp32, with ten runs each, one
    of four "is faster" by its quartiles in every seventh benchmark, and with three runs in nearly every second.
    """
    count = len(ratios)
    on_a_side = max(
        sum(each < 1 - _EQUAL for each in ratios), sum(each > 1 + _EQUAL for each in ratios)
    )
    ways = sum(math.comb(count, each) for each in range(on_a_side, count + 1))
    return ways <= LEVEL * 2**count and 2 * on_a_side > count
