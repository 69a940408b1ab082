"""`diff_runs`: aligns the calls of two traces, and says of each whether its types explain the difference."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from ..errors import OptionError, short
from ..ops import facts
from .aligning import Aligned, Side, aligned
from .causes import OUTSIDE, Causes, other_settings
from .judging import (
    GRADIENT_MARGIN,
    MARGIN,
    CallPair,
    TensorsDifference,
    Verdict,
    norm,
    verdict,
)
from .reading import PARAMETER, TracedCall, TracedRun, read
from .run_diff import RunDiff, RunDiffRow
from .sketches import Estimate

_OTHER_RANDOM_NUMBERS: Final = "compiled code draws other random numbers, unless torch._inductor.config.fallback_random is True"

_ENVIRONMENT: Final = ("torch", "machine", "device", "threads", "processes")

_NO_ESTIMATE: Final = Estimate(math.nan, math.nan)


def diff_runs(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> RunDiff:
    """Compares two traces written by `trace`, call by call: of two precisions, machines, versions, programs.

    Calls are aligned by op and module, in their order; calls that only one run makes are rows, too.
    A row's difference is an estimate. Its verdict is ``"equal"`` (the same bits), ``"rounding"``
    (the types that the call computed in explain it), ``"inherited"`` (differences of its inputs
    do), ``"unexplained"``, ``"only in a"``, ``"only in b"``, or ``"not compared"``: other shapes,
    or values that can't be read. Where an optimizer steps with other settings, that is a row.

    Args:
        a: The reference's trace.
        b: The other one.

    Raises:
        OptionError: A file can't be read or is not a trace, or they have two formats.

    Example:
        >>> x = torch.linspace(0, 1, 64)
        >>> for name, eps in (("a.hmpx", 1e-5), ("b.hmpx", 1e-3)):
        ...     with hmpx.trace(name):
        ...         y = torch.nn.functional.layer_norm(x * 2, (64,), eps=eps)
        >>> first = hmpx.diff_runs("a.hmpx", "b.hmpx").first
        >>> first.op, first.cause
        ('layer_norm', 'arguments: (64), 1e-05, True in a, (64), 0.001, True in b')
    """
    first, second = read(a), read(b)
    formats = [run.header["format"] for run in (first, second)]
    if formats[0] != formats[1]:
        raise OptionError(
            f"{short(os.fspath(a))} has format {formats[0]}, {short(os.fspath(b))} format {formats[1]}; trace both "
            "with one hmpx"
        )
    about = [
        {**run.header, "steps": len({each.step for each in run.calls})} for run in (first, second)
    ]
    return RunDiff((*_Diff(first, second).rows(),), *about)


class _Diff:
    """The comparison of two runs."""

    def __init__(self, a: TracedRun, b: TracedRun) -> None:
        self._a, self._b = Side(a), Side(b)
        self._is_same_machine = all(a.header[each] == b.header[each] for each in _ENVIRONMENT)
        ours, theirs = self._a.steps(), self._b.steps()
        common = sorted(ours.keys() & theirs.keys())
        self._steps = {step: aligned(ours[step], theirs[step]) for step in common}
        first = _pairs(self._steps[common[0]]) if common else {}
        self._causes = Causes(self._a, self._b, first.values())
        self._settings = ""  # how those of the optimizers differed last

    def rows(self) -> Iterator[RunDiffRow]:
        """Yields a row for each call of a step, then for its gradients, in the order of computation."""
        for step, calls in self._steps.items():
            for row in self._of_step(step, calls):
                self._causes.has_differed |= row.verdict != "equal"
                yield row

    def _of_step(self, step: int, calls: Sequence[Aligned]) -> Iterator[RunDiffRow]:
        pairs = _pairs(calls)
        for a, b in calls:
            if a is None or b is None:
                yield self._only(a, b)
            elif a.site.op != PARAMETER:
                yield _row(a, b, "forward", self._judged(pairs[a]), pairs[a].outputs)
        for pair in reversed(pairs.values()):
            if pair.has_gradients:
                keys = sorted(pair.a.gradients.keys() & pair.b.gradients.keys())
                gradient = norm(pair.a.gradients[key] for key in keys)
                users = self._a.consumers[pair.a]
                found = self._judged_backward(
                    pair.gradients, users, pairs, norm(pair.a.outputs), gradient
                )
                yield _row(pair.a, pair.b, "backward", found, pair.gradients)
        for pair in pairs.values():
            if pair.a.site.op == PARAMETER:
                users, gradient = self._a.users[pair.a.site.module], norm(pair.a.outputs)
                found = self._judged_backward(pair.outputs, users, pairs, 0.0, gradient)
                yield _row(pair.a, pair.b, "backward", found, pair.outputs)
        yield from self._optimizer(step)

    def _only(self, a: TracedCall | None, b: TracedCall | None) -> RunDiffRow:
        """Returns the row of a call that one run makes."""
        # A graph leaves out what its results don't need, and calls inside of branches and transforms.
        call, other = (a, self._b) if a else (b, self._a)
        is_left_out = call and other.is_compiled and not call.site.is_compiled
        only = "only in a" if b is None else "only in b"
        return _row(a, b, "forward", Verdict("not compared" if is_left_out else only))

    def _optimizer(self, step: int) -> Iterator[RunDiffRow]:
        """Yields a row if the settings of the step's optimizers differ, unless they did so before."""
        a, b = (side.run.optimizers.get(step) for side in (self._a, self._b))
        if not (a and b):
            return
        cause = other_settings(a, b)
        if cause and cause != self._settings:
            found, nothing = ("unexplained", *_NO_ESTIMATE, 0.0, cause), ("", "")
            yield RunDiffRow(a.name, "", "", "optimizer", *found, nothing, nothing, nothing, step)
        self._settings = cause

    def _judged(self, pair: CallPair) -> Verdict:
        """Judges the results of a call."""
        if pair.outputs.is_same:
            return Verdict("equal")
        a, b, incoming = pair.a, pair.b, pair.inputs.total
        if len(a.inputs) != len(b.inputs) and pair.outputs.is_compared:
            found = verdict(pair.outputs, pair.roundoff, pair.gain, incoming, MARGIN)
            if found.verdict != "unexplained":  # a mask for what a flag says
                return found
        elif pair.inputs.shapes:
            return Verdict("not compared", pair.inputs.shapes)
        if cause := self._causes.of(pair):
            return Verdict("unexplained", cause)
        if not (pair.inputs.is_compared and pair.outputs.is_compared):
            return Verdict("not compared", pair.outputs.shapes)
        if a.site.arguments != b.site.arguments:
            return Verdict("inherited")  # numbers that differ as results do
        rounding = 0.0 if self._is_exact(pair) and not pair.is_compiled else pair.roundoff
        self._causes.coarsest = max(self._causes.coarsest, rounding)
        found = verdict(pair.outputs, rounding, pair.gain, incoming, MARGIN)
        is_drawn = a.site.op in facts("random") and a.site.is_compiled != b.site.is_compiled
        if found.verdict == "unexplained" and is_drawn:
            return found._replace(cause=_OTHER_RANDOM_NUMBERS)
        return found

    def _is_exact(self, pair: CallPair) -> bool:
        """Whether a call must have the same bits in both runs."""
        return self._is_same_machine and pair.inputs.is_same and pair.is_decided_alike

    def _judged_backward(
        self,
        found: TensorsDifference,
        users: Sequence[TracedCall],
        pairs: Mapping[TracedCall, CallPair],
        size: float,
        gradient: float,
    ) -> Verdict:
        """Judges a gradient that the backward of ``users`` computed.

        It may be small since its parts cancel, such as that of a bias before a norm: these parts are as large as
        the gradient that comes in, times what the calls make of ``size``.
        """
        rounding, gain, incoming, is_exact = 0.0, 1.0, list[float](), True
        used = [pairs[each] for each in users if each in pairs]
        for pair in used:
            is_exact &= self._is_exact(pair) and pair.has_gradients and pair.gradients.is_same
            unseen = (
                pair.is_compiled * OUTSIDE * self._causes.coarsest
            )  # gradients inside of a graph
            incoming += [pair.gradients.total, pair.inputs.total, unseen]
            rounding = max(rounding, pair.roundoff)
            growth = norm(pair.a.outputs) / size if size else 0.0
            part = norm(pair.a.gradients.values()) * max(1.0, growth)
            gain = max(gain, pair.a.gain, pair.b.gain, part / gradient if gradient else 1.0)
        if (
            not used and found.is_compared and not found.is_same
        ):  # the loss, or the program's own functions
            return Verdict("inherited" if self._causes.has_differed else "unexplained")
        rounding = 0.0 if is_exact else rounding
        return verdict(found, rounding, gain, math.hypot(*incoming), GRADIENT_MARGIN)


def _pairs(calls: Sequence[Aligned]) -> dict[TracedCall, CallPair]:
    """Returns the calls that both runs make, by that of run a."""
    return {a: CallPair(a, b) for a, b in calls if a is not None and b is not None}


def _row(
    a: TracedCall | None,
    b: TracedCall | None,
    phase: str,
    found: Verdict,
    difference: TensorsDifference | None = None,
) -> RunDiffRow:
    call = a or b
    assert call is not None
    estimate = _NO_ESTIMATE
    if difference and found.verdict != "not compared":
        estimate = difference.largest
    if difference and difference.zeros and math.isinf(estimate.rel):
        found = found._replace(cause=f"zero in a{found.cause and ': '}{found.cause}")
    said = [
        "" if each is None else each.decision + ", compiled" * each.site.is_compiled
        for each in (a, b)
    ]
    locations = ["" if each is None else each.site.location for each in (a, b)]
    return RunDiffRow(
        call.site.op,
        call.site.module,
        locations[0] or locations[1],
        phase,
        found.verdict,
        *estimate,
        found.explained,
        found.cause,
        ("" if a is None else a.dtype, "" if b is None else b.dtype),
        (said[0], said[1]),
        (locations[0], locations[1]),
        call.step,
    )
