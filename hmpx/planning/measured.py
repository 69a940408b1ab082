"""The result of `bench`, as a table and a verdict in words."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

from ..errors import OptionError, brief, shown
from ..reports import Column, ReportTable, Written, clean, page, paragraphs, size, wrapped
from .runner import BASE

#: The version of the JSON that `Bench.to_json` writes.
SCHEMA: Final = 1

#: Largest chance that a variant as fast as fp32 counts as faster; for slower likewise.
LEVEL: Final = 1 / 64

#: With fewer runs, all having the same sign is too likely by chance.
FEWEST_RUNS: Final = 6

#: Ratios this close to 1 count as equal: a variant's place in its turn can cause as much.
_EQUAL: Final = 0.01


@dataclass(frozen=True)
class Quartiles:
    """The quartiles of some figures.

    Attributes:
        low: A quarter of the figures are below it.
        median: The figure in the middle.
        high: A quarter of the figures are above it.
    """

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> Quartiles:
        """Returns the quartiles of at least one figure."""
        if len(figures) == 1:
            return cls(figures[0], figures[0], figures[0])
        return cls(*statistics.quantiles(figures, n=4, method="inclusive"))


@dataclass(frozen=True)
class Measured:
    """One variant.

    Attributes:
        name: The name given by the user: ``"fp32"``, ``"auto"``.
        label: The name in the table.
        error: The error that ended it, and then nothing else is known; None if it ran.
        error_location: The user's line that raised the error, ``"train.py:12"``, if known.
        ratio: Quartiles of ``ratios``.
        ratios: For each turn, the time of its run divided by that of fp32's.
        step_s: Seconds per step, as quartiles of all runs.
        steps: Steps per run.
        loss: The step's result after ``loss_step`` steps, if that is a number.
        loss_step: The last step that all variants have made.
        loss_difference: ``loss`` minus that of fp32.
        not_finite_at: The first step up to ``loss_step`` whose loss is NaN or infinite; None if there is none.
        output_error: If the step returns tensors: norm of the difference from fp32's over the norm of
            fp32's, after the first step.
        memory_bytes: Peak memory of a step above the memory in use before it; None where torch and the
            system don't report it.
    """

    name: str
    label: str
    error: str | None = None
    error_location: str = ""
    ratio: Quartiles | None = None
    ratios: tuple[float, ...] = ()
    step_s: Quartiles | None = None
    steps: int = 0
    loss: float | None = None
    loss_step: int = 0
    loss_difference: float | None = None
    not_finite_at: int | None = None
    output_error: float | None = None
    memory_bytes: int | None = None

    @property
    def is_other(self) -> bool:
        """Whether it is faster or slower than fp32 in more of the turns than chance explains."""
        return is_beyond_chance(self.ratios)


@dataclass(frozen=True)
class Bench(Written):
    """Figures of the same step in several precisions.

    Attributes:
        device: The device it ran on.
        threads: torch's number of threads on the CPU.
        clock: ``"wall"`` or ``"cpu"``: the clock of all times.
        runs: Runs per variant; fewer than requested if the user interrupted it.
        seed: The seed of each variant.
        variants: The measurements, fp32 first.
        notes: Further remarks.
        is_interrupted: Whether the user ended it before all runs.
        low_op: The first op that fp32's step itself runs in low precision: ``"linear gives
            bfloat16, at train.py:12"``. There is no verdict then. ``""`` if there is none.
        about: See [results](#results).

    Example:
        >>> def make_step():
        ...     model = torch.nn.Linear(8, 8)
        ...     return lambda: model(torch.ones(4, 8)).square().mean()
        >>> found = hmpx.bench(make_step, device="cpu", variants=["auto"], runs=2, run_s=0.0)
        >>> [each.label for each in found.variants], found.variant("fp32").ratio.median
        (['fp32', 'hmpx auto'], 1.0)
    """

    device: str
    threads: int
    clock: str
    runs: int
    seed: int
    variants: tuple[Measured, ...]
    notes: tuple[str, ...] = ()
    is_interrupted: bool = False
    low_op: str = ""
    about: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def variant(self, name: str) -> Measured:
        """Returns the measurements of one variant.

        Raises:
            OptionError: It did not run.
        """
        for each in self.variants:
            if each.name == name:
                return each
        known = ", ".join(repr(each.name) for each in self.variants)
        raise OptionError(f"this benchmark has no {shown(name)} (there is: {known})")

    __repr__ = brief

    def __str__(self) -> str:
        said = [line for each in _sentences(self) for line in wrapped(each)]
        return "\n".join([_headline(self), "", *_table(self.variants).lines(), "", *said])

    def _repr_html_(self) -> str:
        said = paragraphs(_sentences(self))
        return f"<div>{paragraphs([_headline(self)])}{_table(self.variants).to_html()}{said}</div>"

    def _data(self) -> Mapping[str, Any]:
        variants = {each.name: asdict(each) for each in self.variants}
        return {"hmpx_bench": SCHEMA, **asdict(self), "variants": variants}

    def _table(self) -> ReportTable:
        return ReportTable.of_fields([each.name for each in fields(Measured)], self.variants)

    def _page(self) -> str:
        return page("hmpx bench", "A step in each precision", self._repr_html_(), self.about)


# --- text ----------------------------------------------------------------------------------------


def _headline(bench: Bench) -> str:
    runs = "1 run" if bench.runs == 1 else f"{bench.runs} runs"
    threads = "1 thread" if bench.threads == 1 else f"{bench.threads} threads"
    clock = ", processor time" if bench.clock == "cpu" else ""
    return f"{clean(bench.device)}, {threads}: {runs} each, in turns{clock}"


def _sentences(bench: Bench) -> Iterator[str]:
    yield _verdict(bench)
    for each in bench.variants:
        if each.not_finite_at is not None:
            yield f"The loss of {each.label} is NaN or infinite at step {each.not_finite_at}."
        elif _is_broken(each, bench.variants[0]):
            yield f"The output of {each.label} is NaN or infinite where that of fp32 is not."
    for each in bench.variants:
        if each.error is not None:
            where = f", at {clean(each.error_location)}" if each.error_location else ""
            yield f"{each.label} failed: {clean(each.error)}{where}"
    yield from bench.notes


def _table(rows: Sequence[Measured]) -> ReportTable:
    others = [None if each.name == BASE else each for each in rows]
    columns = [
        Column("", [each.label for each in rows], is_number=False),
        Column(
            "of fp32", [each.ratio if each.error is None else "failed" for each in rows], _ratio
        ),
        Column(
            "quartiles", [each and each.ratio for each in others], "{0.low:.2f}-{0.high:.2f}".format
        ),
        Column("a step", [each.step_s for each in rows], _time),
    ]
    if any(each.loss is not None for each in rows):
        title = f"loss at {max(each.loss_step for each in rows)}"
        columns.append(Column(title, [each.loss for each in rows], "{:.5g}".format))
        differences = [each and each.loss_difference for each in others]
        columns.append(Column("- fp32's", differences, "{:+.1e}".format))
    if any(each.output_error is not None for each in rows):
        errors = [each and each.output_error for each in others]
        columns.append(Column("error", errors, "{:.1e}".format))
    if any(each.memory_bytes is not None for each in rows):
        columns.append(Column("memory", [each.memory_bytes for each in rows], size))
    return ReportTable(columns)


def _ratio(ratio: Quartiles | str) -> str:
    return ratio if isinstance(ratio, str) else f"{ratio.median:.2f}"


def _time(step_s: Quartiles) -> str:
    """Returns a time with three digits, or with all digits before the point."""
    units = (("s", 1.0), ("ms", 1e3), ("us", 1e6))
    scaled = [(step_s.median * factor, unit) for unit, factor in units]
    value, unit = next((each for each in scaled if each[0] >= 0.9995), scaled[-1])
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


# --- verdict -------------------------------------------------------------------------------------


def _verdict(bench: Bench) -> str:
    """Returns the fastest variant, the time it saves, and the variants too close to tell apart.

    A variant without a finite loss or output, where fp32's is finite, can't be the fastest.
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
        equal = [
            each.label
            for each in sound
            if each is not best
            and not is_beyond_chance([a / b for a, b in zip(each.ratios, best.ratios, strict=True)])
        ]
        more = f" Equal to it within what runs vary: {', '.join(equal)}." if equal else ""
        return f"Fastest is {_took(best)}.{more}"
    if nearest.is_other:
        return f"None is faster than fp32. The nearest is {_took(nearest)}."
    count = sum(each < 1.0 for each in nearest.ratios)
    return (
        f"None is shown to be faster than fp32. The nearest, {_took(nearest)}, was faster in {count} of "
        f"{len(nearest.ratios)} runs, as equal ones may be."
    )


def _is_broken(row: Measured, base: Measured) -> bool:
    if row.output_error is not None and not math.isfinite(row.output_error):
        return True
    return row.not_finite_at is not None and base.not_finite_at is None


def _took(row: Measured) -> str:
    return f"{row.label}: {_median(row):.2f} of fp32's time"


def _median(row: Measured) -> float:
    return float("inf") if row.ratio is None else row.ratio.median


def is_beyond_chance(ratios: Sequence[float]) -> bool:
    """Whether the sign test shows that the ratios differ from 1.

    Quartiles that exclude 1 do not show it. Of four variants equal to fp32, with ten runs each,
    one "is faster" by its quartiles in every seventh benchmark; with three runs, in nearly every second.
    """
    count = len(ratios)
    on_a_side = max(
        sum(each < 1 - _EQUAL for each in ratios), sum(each > 1 + _EQUAL for each in ratios)
    )
    ways = sum(math.comb(count, each) for each in range(on_a_side, count + 1))
    return ways <= LEVEL * 2**count and 2 * on_a_side > count
