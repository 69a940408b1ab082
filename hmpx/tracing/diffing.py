"""`diff_runs`: aligns the calls of two traces, and says of each whether its types explain the difference.

A call's difference is explained by the rounding of what it computed in, and by differences of its inputs, both
times the call's own gain. Where nothing was rounded otherwise and the inputs have the same bits, the results must.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Final, NamedTuple

import torch

from ..number_formats import get, names
from ..ops import facts
from .aligning import Side, aligned
from .reading import PARAMETER, TracedCall, TracedRun, TracedTensor, read
from .run_diff import RunDiff, RunDiffRow
from .sketches import Estimate, difference

#: By how much a difference may exceed its explanation, of results and of gradients: the gain is measured with
#: random changes, and actual ones have a structure. Calibrated on 40 models in float32 and bfloat16.
_MARGIN: Final = 8.0
_GRADIENT_MARGIN: Final = 64.0

#: Units of roundoff by which a tensor that no call made may differ once results differ: other code may have made
#: it from them.
_OUTSIDE: Final = 64.0

#: The gain of calls for which it is not known, and of a backward.
_UNKNOWN_GAIN: Final = 4.0

_OTHER_RANDOM_NUMBERS: Final = "compiled code draws other random numbers, unless torch._inductor.config.fallback_random is True"

_ENVIRONMENT: Final = ("torch", "machine", "device", "threads", "processes")


def diff_runs(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> RunDiff:
    """Compares two traces written by `trace`, call by call: of two precisions, machines, versions, programs.

    Calls are aligned by op and module, in their order; calls that only one run makes are rows, too.
    A row's difference is an estimate. Its verdict is ``"equal"`` (the same bits), ``"rounding"``
    (the types that the call computed in explain it), ``"inherited"`` (differences of its inputs
    do), ``"unexplained"``, ``"only in a"``, ``"only in b"``, or ``"not compared"``: other shapes,
    or values that can't be read.

    Args:
        a: The reference's trace.
        b: The other one.

    Raises:
        OptionError: A file can't be read, or is not a trace.

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
    about = [
        {**run.header, "steps": len({each.step for each in run.calls})} for run in (first, second)
    ]
    return RunDiff((*_Diff(first, second).rows(),), *about)


class _Difference(NamedTuple):
    """The difference of some tensors of a call.

    Attributes:
        is_same: All have the same bits and dtypes.
        rel: Estimates of those that can be compared.
        is_compared: All have the same shapes and can be read.
    """

    is_same: bool
    rel: list[Estimate]
    is_compared: bool

    @property
    def largest(self) -> Estimate:
        """The largest one; 0 for none."""
        return max(self.rel, default=Estimate(0.0))

    @property
    def total(self) -> float:
        """The root of the sum of squares, each with its error."""
        return math.hypot(*[each.rel + 2 * each.error for each in self.rel])


class _Verdict(NamedTuple):
    verdict: str
    cause: str = ""
    explained: float = 0.0


class _Diff:
    """The comparison of two runs."""

    def __init__(self, a: TracedRun, b: TracedRun) -> None:
        self._a, self._b = Side(a), Side(b)
        self._is_same_machine = all(a.header[each] == b.header[each] for each in _ENVIRONMENT)
        self._partners: dict[int, int] = {}  # call of a -> call of b
        self._named: set[int] = set()  # tensors of a, made elsewhere, whose difference is known
        self._is_compiled = [any(each.site.is_compiled for each in run.calls) for run in (a, b)]
        self._has_differed = any(self._is_compiled)  # any row so far, or what no call made may
        self._has_other_types = False  # so far
        self._known: set[str] = set()  # parameters and buffers that were compared
        self._first_step = 0
        self._coarsest = 0.0  # the largest unit roundoff so far

    def rows(self) -> Iterator[RunDiffRow]:
        """Yields a row for each call of a step, then for its gradients, in the order of computation."""
        steps_a, steps_b = self._a.steps(), self._b.steps()
        common = sorted(steps_a.keys() & steps_b.keys())
        for step in common:
            pairs = [*aligned(self._a.calls, steps_a[step], self._b.calls, steps_b[step])]
            both = [(a, b) for a, b in pairs if a is not None and b is not None]
            self._partners, self._first_step = dict(both), common[0]
            for a, b in pairs:
                if a is None or b is None:
                    yield self._only(a, b)
                elif self._a.calls[a].site.op != PARAMETER:
                    yield self._row("forward", a, b, *self._judged(a, b))
                    given = [self._a.origin(each)[0] for each in self._a.calls[a].inputs]
                    self._known.update([self._a.tensors[each].name for each in given])
            for a, b in reversed(both):
                if self._a.calls[a].gradients.keys() & self._b.calls[b].gradients.keys():
                    yield self._row("backward", a, b, *self._judged_gradient(a, b))
            for a, b in both:
                if self._a.calls[a].site.op == PARAMETER:
                    yield self._row("backward", a, b, *self._judged_parameter(a, b))

    def _row(self, phase: str, a: int, b: int, found: _Difference, verdict: _Verdict) -> RunDiffRow:
        is_compared = verdict.verdict != "not compared"
        rel = found.largest if is_compared else Estimate(math.nan, math.nan)
        return self._of(self._a.calls[a], self._b.calls[b], phase, verdict, rel)

    def _only(self, a: int | None, b: int | None) -> RunDiffRow:
        """Returns the row of a call that one run makes."""
        first = None if a is None else self._a.calls[a]
        second = None if b is None else self._b.calls[b]
        # A graph leaves out what its results don't need, and calls inside of branches and transforms.
        call = first or second
        is_left_out = call and self._is_compiled[b is None] and not call.site.is_compiled
        only = "only in a" if b is None else "only in b"
        verdict = _Verdict("not compared" if is_left_out else only)
        return self._of(first, second, "forward", verdict, Estimate(math.nan, math.nan))

    def _of(
        self,
        a: TracedCall | None,
        b: TracedCall | None,
        phase: str,
        verdict: _Verdict,
        rel: Estimate,
    ) -> RunDiffRow:
        self._has_differed |= verdict.verdict != "equal"
        call = a or b
        assert call is not None
        locations = ["" if each is None else each.site.location for each in (a, b)]
        return RunDiffRow(
            call.site.op,
            call.site.module,
            locations[0] or locations[1],
            phase,
            verdict.verdict,
            *rel,
            verdict.explained,
            verdict.cause,
            ("" if a is None else self._a.type_of(a), "" if b is None else self._b.type_of(b)),
            (_said(a), _said(b)),
            (locations[0], locations[1]),
            call.step,
        )

    # --- results -------------------------------------------------------------------------------

    def _judged(self, a: int, b: int) -> tuple[_Difference, _Verdict]:
        first, second = self._a.calls[a], self._b.calls[b]
        outputs = self._difference(first.outputs, second.outputs)
        if outputs.is_same:
            return outputs, _Verdict("equal")
        inputs = self._difference(first.inputs, second.inputs)
        gain = max(first.gain, second.gain, self._norm_ratio(first)) or _UNKNOWN_GAIN
        if len(first.inputs) != len(second.inputs) and outputs.is_compared:
            found = _judge(outputs, self._roundoff(first, second), gain, inputs.total, _MARGIN)
            if found.verdict != "unexplained":  # a mask for what a flag says
                return outputs, found
        if cause := self._cause(first, second, inputs, outputs):
            return outputs, _Verdict("unexplained", cause)
        if not (inputs.is_compared and outputs.is_compared):
            return outputs, _Verdict("not compared")
        if first.site.arguments != second.site.arguments:
            return outputs, _Verdict("inherited")  # numbers that differ as results do
        decided = _decision(first) == _decision(second)
        is_compiled = first.site.is_compiled or second.site.is_compiled
        is_exact = decided and inputs.is_same and self._is_same_machine and not is_compiled
        rounding = 0.0 if is_exact else self._roundoff(first, second)
        self._coarsest = max(self._coarsest, rounding)
        found = _judge(outputs, rounding, gain, inputs.total, _MARGIN)
        is_drawn = (
            first.site.op in facts("random") and first.site.is_compiled != second.site.is_compiled
        )
        if found.verdict == "unexplained" and is_drawn:
            found = found._replace(cause=_OTHER_RANDOM_NUMBERS)
        return outputs, found

    def _norm_ratio(self, call: TracedCall) -> float:
        """Returns the gain of an op of one tensor that keeps differences as they are, as ``clamp`` may; else 0."""
        if len(call.inputs) != 1 or len(call.outputs) != 1:
            return 0.0
        given, made = self._a.tensors[call.inputs[0]], self._a.tensors[call.outputs[0]]
        if given.shape != made.shape or not (given.sketch and made.sketch and made.sketch.norm):
            return 0.0
        return given.sketch.norm / made.sketch.norm

    def _cause(
        self, a: TracedCall, b: TracedCall, inputs: _Difference, outputs: _Difference
    ) -> str:
        """Returns why results differ other than by rounding and size; ``""`` if nothing shows it."""
        if len(a.inputs) != len(b.inputs) or len(a.outputs) != len(b.outputs):
            return f"tensors: {len(a.inputs)} in a, {len(b.inputs)} in b"
        if cause := self._cause_outside(a, b):
            return cause
        if a.site.arguments != b.site.arguments and not self._is_near(a, b):
            return f"arguments: {a.site.arguments} in a, {b.site.arguments} in b"
        if cause := self._cause_in_types(a, b):
            return cause
        nonfinite = [
            sum(found.nonfinite for each in numbers if (found := side.tensors[each].sketch))
            for side, call in ((self._a, a), (self._b, b))
            for numbers in (call.inputs, call.outputs)
        ]
        if nonfinite[0] == nonfinite[2] and nonfinite[1] != nonfinite[3]:
            return f"values that are not finite: {nonfinite[1]} in a, {nonfinite[3]} in b"
        shapes = [
            [side.tensors[each].shape for each in call.outputs]
            for side, call in ((self._a, a), (self._b, b))
        ]
        if inputs.is_same and shapes[0] != shapes[1]:
            return "results of other shapes"
        return ""

    def _cause_outside(self, a: TracedCall, b: TracedCall) -> str:
        """Names an input that other code than the traced calls made, or converted or sliced otherwise."""
        for i, j in zip(a.inputs, b.inputs, strict=True):
            (given, maker), (other, other_maker) = self._a.origin(i), self._b.origin(j)
            found = self._difference([given], [other])
            is_made = maker is not None and other_maker is not None
            if is_made:
                if not found.is_same:
                    continue  # its maker's row says why
                given, other, found = i, j, self._difference([i], [j])
            first, second = self._a.tensors[given], self._b.tensors[other]
            is_new = first.name not in self._known and a.step == self._first_step
            if found.is_same or not found.is_compared or given in self._named:
                continue
            self._named.add(given)
            types = {first.dtype, second.dtype, first.contents, second.contents}
            roundoff = max(map(_roundoff, types))
            is_low = first.dtype != second.dtype or first.contents != second.contents
            least = found.largest.rel - 2 * found.largest.error
            is_rounded = is_low and least <= 2 * roundoff
            if is_rounded and not is_made and first.dtype != second.dtype:
                self._has_other_types = True
            if is_rounded and self._has_other_types:
                continue
            if (
                not is_made
                and maker != other_maker
                and self._is_compiled[0] != self._is_compiled[1]
            ):
                continue  # a call that the graph leaves out made it
            low = second.contents or first.contents
            values = (
                f": {low} values in {'b' if second.contents else 'a'}" if is_low and low else ""
            )
            if is_made:
                made = self._a.calls[maker].site.op if maker is not None else ""
                return f"what {made} returned is converted or sliced otherwise{values}"
            if first.name:
                is_explained = not is_new  # an optimizer has written to it since
            else:
                is_explained = least <= _OUTSIDE * max(roundoff, self._coarsest)
            if not (is_explained and self._has_differed):
                name = first.name or f"a {_kind(first)} tensor made outside of the traced calls"
                return f"{name} differs{_by(found.largest)}{values}"
        return ""

    def _cause_in_types(self, a: TracedCall, b: TracedCall) -> str:
        """Names types that differ though all calls so far, and what decided them, have the same."""
        types = [
            [
                (self._a.tensors[i].dtype, self._b.tensors[j].dtype)
                for i, j in zip(*each, strict=True)
            ]
            for each in ((a.inputs, b.inputs), (a.outputs, b.outputs))
        ]
        if _decision(a) != _decision(b):
            self._has_other_types = True
        for said, pairs in zip(("takes", "returns"), types, strict=True):
            for one, other in pairs:
                if one != other and not self._has_other_types:
                    self._has_other_types = True
                    return f"{said} {one} in a, {other} in b"
        return ""

    def _is_near(self, a: TracedCall, b: TracedCall) -> bool:
        """Whether numbers differ as they may that were computed from tensors, or from a dtype's range."""
        first, second = a.site.arguments.split(", "), b.site.arguments.split(", ")
        is_near = len(first) == len(second) and all(map(_is_near, first, second))
        return is_near and (self._has_differed or self._has_other_types)

    # --- gradients -----------------------------------------------------------------------------

    def _judged_gradient(self, a: int, b: int) -> tuple[_Difference, _Verdict]:
        first, second = self._a.calls[a].gradients, self._b.calls[b].gradients
        keys = sorted(first.keys() & second.keys())
        found = self._difference([first[key] for key in keys], [second[key] for key in keys])
        calls = self._a.consumers.get(a, [])
        made, given = self._a.calls[a].outputs, [first[key] for key in keys]
        return found, self._judged_backward(found, calls, self._norm(made), self._norm(given))

    def _judged_parameter(self, a: int, b: int) -> tuple[_Difference, _Verdict]:
        call = self._a.calls[a]
        found = self._difference(call.outputs, self._b.calls[b].outputs)
        calls = self._a.users.get(call.site.module, [])
        return found, self._judged_backward(found, calls, 0.0, self._norm(call.outputs))

    def _judged_backward(
        self, found: _Difference, calls: Sequence[int], norm: float, gradient: float
    ) -> _Verdict:
        """Judges a gradient that the backward of ``calls`` computed.

        It may be small since its parts cancel, such as that of a bias before a norm: these parts are as large as
        the gradient that comes in, times what the calls make of ``norm``.
        """
        if found.is_same:
            return _Verdict("equal")
        if not found.is_compared:
            return _Verdict("not compared")
        rounding, gain, incoming, is_exact = 0.0, 1.0, list[float](), self._is_same_machine
        step = [each for each in calls if each in self._partners]
        for each in step:
            a, b = self._a.calls[each], self._b.calls[self._partners[each]]
            keys = sorted(a.gradients.keys() & b.gradients.keys())
            given = self._difference(
                [a.gradients[key] for key in keys], [b.gradients[key] for key in keys]
            )
            inputs = self._difference(a.inputs, b.inputs)
            is_exact &= (
                bool(keys) and given.is_same and inputs.is_same and _decision(a) == _decision(b)
            )
            is_unseen = a.site.is_compiled or b.site.is_compiled  # the gradients inside of a graph
            incoming += [given.total, inputs.total, is_unseen * _OUTSIDE * self._coarsest]
            rounding, gain = max(rounding, self._roundoff(a, b)), max(gain, a.gain, b.gain)
            part = self._norm(a.gradients.values())
            growth = self._norm(a.outputs) / norm if norm else 0.0
            gain = max(gain, part * max(1.0, growth) / gradient if gradient else 1.0)
        if not step:  # the loss, or the program's own functions
            return _Verdict("inherited" if self._has_differed else "unexplained", "")
        return _judge(
            found, 0.0 if is_exact else rounding, gain, math.hypot(*incoming), _GRADIENT_MARGIN
        )

    # --- tensors -------------------------------------------------------------------------------

    def _norm(self, tensors: Iterable[int]) -> float:
        """Returns the L2 norm of tensors of run a."""
        found = [self._a.tensors[each].sketch for each in tensors]
        return math.hypot(*[each.norm for each in found if each])

    def _difference(self, a: Sequence[int], b: Sequence[int]) -> _Difference:
        pairs = [(self._a.tensors[i], self._b.tensors[j]) for i, j in zip(a, b, strict=False)]
        rel = [
            difference(one.sketch, other.sketch)
            for one, other in pairs
            if one.sketch and other.sketch and one.shape == other.shape
        ]
        is_compared = len(rel) == len(pairs) == len(a) == len(b)
        return _Difference(
            is_compared and all(itertools.starmap(_is_same, pairs)), rel, is_compared
        )

    def _roundoff(self, a: TracedCall, b: TracedCall) -> float:
        """Returns the largest unit roundoff of the types of two calls."""
        of_calls = [
            side.tensors[each].dtype
            for side, call in ((self._a, a), (self._b, b))
            for each in (*call.inputs, *call.outputs)
        ]
        return max(map(_roundoff, (*of_calls, a.site.dtype, b.site.dtype)))


def _judge(
    found: _Difference, rounding: float, gain: float, incoming: float, margin: float
) -> _Verdict:
    by_rounding = margin * rounding * math.hypot(1.0, gain)
    explained = math.hypot(by_rounding, margin * gain * incoming) if incoming else by_rounding
    explained = math.expm1(min(explained, 700.0))  # large ones grow in each other
    least = found.largest.rel - 2 * found.largest.error
    if rounding and least <= by_rounding:
        return _Verdict("rounding", "", by_rounding)
    if incoming and (least <= explained or math.isinf(least)):  # integers, or zeros in a
        return _Verdict("inherited", "", explained)
    if not explained:
        return _Verdict("unexplained", "other bits from equal inputs")
    return _Verdict(
        "unexplained", f"its types and inputs explain at most {explained:.1e}", explained
    )


def _is_same(a: TracedTensor, b: TracedTensor) -> bool:
    assert a.sketch is not None and b.sketch is not None
    return a.sketch.digest == b.sketch.digest and a.dtype == b.dtype


def _decision(call: TracedCall) -> str:
    return f"{call.site.dtype or 'left alone'} ({call.site.reason})"


def _said(call: TracedCall | None) -> str:
    if call is None:
        return ""
    return _decision(call) + ", compiled" * call.site.is_compiled


def _by(found: Estimate) -> str:
    return f" by {found.rel:.1e}" if math.isfinite(found.rel) else ""


def _kind(tensor: TracedTensor) -> str:
    return f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"


def _is_near(a: str, b: str) -> bool:
    try:
        return math.isclose(float(a.strip("()")), float(b.strip("()")), rel_tol=0.1)
    except ValueError:
        return a == b


@cache
def _roundoff(dtype: str) -> float:
    """Returns the unit roundoff of a dtype or number format by its name; 0 for others."""
    known = getattr(torch, dtype, None) if dtype else None
    if isinstance(known, torch.dtype):
        return torch.finfo(known).eps / 2 if known.is_floating_point else 0.0
    # Of a format that is only a function nothing is known.
    return float(getattr(get(dtype), "epsilon", 1.0)) / 2 if dtype in names() else 0.0
