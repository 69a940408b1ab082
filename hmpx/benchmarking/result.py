"""What `bench` has measured, and its views."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from ..errors import OptionError, shown
from ..reports import plain, written
from . import text
from .verdict import is_beyond_chance

#: The version of the JSON that `Bench.to_json` writes.
SCHEMA: Final = 1


@dataclass(frozen=True)
class Quartiles:
    """The middle of some figures, and the middles of their lower and upper half.

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
        """Returns those of at least one figure."""
        if len(figures) == 1:
            return cls(figures[0], figures[0], figures[0])
        return cls(*statistics.quantiles(figures, n=4, method="inclusive"))


@dataclass(frozen=True)
class Measured:
    """One variant.

    Attributes:
        name: As it was asked for: ``"fp32"``, ``"auto"``.
        label: As the table shows it.
        error: What ended it, and nothing else is known then; None if it ran.
        error_location: The user's line that the error came from, ``"train.py:12"``, if known.
        ratio: The middle of ``ratios``.
        ratios: For each turn, the time of its run divided by that of fp32's.
        step_s: Seconds of a step: the middle of all runs.
        steps: Steps of a run.
        loss: What the step returned, if that is a number, after ``loss_step`` steps.
        loss_step: The last step that all variants have made.
        loss_difference: ``loss`` less that of fp32.
        not_finite_at: The first step up to ``loss_step`` whose loss is NaN or infinite; None if there is none.
        output_error: If the step returns tensors: the norm of their difference to those of fp32, divided by
            the norm of those; after the first step.
        memory_bytes: The most memory in use during a step, less that before it; None where torch and the
            system don't say.
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
        """Whether it is faster or slower than fp32: in more of the turns than chance explains."""
        return is_beyond_chance(self.ratios)


@dataclass(frozen=True)
class Bench:
    """The same step in several precisions.

    Printing it prints a table and a verdict.

    Attributes:
        device: What it ran on.
        threads: Of torch, on the CPU.
        clock: ``"wall"`` or ``"cpu"``: what the seconds are.
        runs: How many runs each variant had: fewer than asked for, if the user interrupted it.
        seed: What each variant's random numbers began with.
        variants: What was measured, fp32 first.
        notes: What else there is to know.
        is_interrupted: Whether the user ended it before all runs.
        low_op: The first op of fp32's step that is in low precision by the step's own doing, and where:
            ``"linear gives bfloat16, at train.py:12"``. Then there is no verdict. ``""`` if none is.

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

    def variant(self, name: str) -> Measured:
        """Returns what was measured of one variant.

        Raises:
            OptionError: It did not run.
        """
        for each in self.variants:
            if each.name == name:
                return each
        known = ", ".join(repr(each.name) for each in self.variants)
        raise OptionError(f"this benchmark has no {shown(name)} (there is: {known})")

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns all figures as JSON, and writes it to ``path`` if that is given.

        Raises:
            OptionError: The file can't be written.
        """
        found: dict[str, Any] = {"hmpx_bench": SCHEMA, **asdict(self)}
        found["variants"] = {each.name: asdict(each) for each in self.variants}
        return written(json.dumps(plain(found), indent=1, allow_nan=False) + "\n", path)[:-1]

    def __str__(self) -> str:
        return text.text(self)
