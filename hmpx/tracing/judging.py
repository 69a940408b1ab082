"""Verdicts of `diff_runs` from numbers alone: what a call computed in and what its inputs differ by explain a difference.

A call's difference is explained by the rounding of what it computed in, and by differences of its inputs, both
times the call's own gain. Where nothing was rounded otherwise and the inputs have the same bits, the results must.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, NamedTuple

import torch

from ..forks import CachedProperty
from ..number_formats import get, names
from .reading import TracedCall, TracedTensor
from .sketches import Estimate, difference

#: By how much a difference may exceed its explanation, of results and of gradients: the gain is measured with
#: random changes, and actual ones have a structure. `benchmarks/margins.py` measured 7.6 and 59 on 40 models.
MARGIN: Final = 8.0
GRADIENT_MARGIN: Final = 64.0

#: The gain of calls for which it is not known.
_UNKNOWN_GAIN: Final = 4.0


class Verdict(NamedTuple):
    """A verdict, its cause or ``""``, and the largest relative difference that is explained."""

    verdict: str
    cause: str = ""
    explained: float = 0.0


class TensorsDifference(NamedTuple):
    """The difference of some tensors of a call.

    Attributes:
        is_same: All have the same bits and dtypes.
        estimates: Those of tensors that can be compared.
        is_compared: All have the same shapes and can be read.
        shapes: The first tensors whose shapes differ: ``"float32[4, 8] in a, float32[2, 8] in b"``; ``""`` for none.
        zeros: Whether some tensor of a is zero everywhere, so that relative differences from it are infinite.
    """

    is_same: bool
    estimates: Sequence[Estimate]
    is_compared: bool
    shapes: str
    zeros: bool

    @property
    def largest(self) -> Estimate:
        """The largest one; 0 for none."""
        return max(self.estimates, default=Estimate(0.0))

    @property
    def total(self) -> float:
        """The root of the sum of squares, each with its error."""
        return math.hypot(*[each.rel + 2 * each.error for each in self.estimates])


def differences(a: Sequence[TracedTensor], b: Sequence[TracedTensor]) -> TensorsDifference:
    """Returns the difference of the tensors of two runs."""
    pairs = [*zip(a, b, strict=False)]
    others = [(one, other) for one, other in pairs if one.shape != other.shape]
    estimates = [
        _difference(one, other)
        for one, other in pairs
        if one.sketch and other.sketch and one.shape == other.shape
    ]
    is_compared = len(estimates) == len(a) == len(b)
    is_same = is_compared and all(
        one.sketch.digest == other.sketch.digest and one.dtype == other.dtype
        for one, other in pairs
        if one.sketch and other.sketch
    )
    shapes = f"{others[0][0].kind} in a, {others[0][1].kind} in b" if others else ""
    zeros = any(each.sketch and not each.sketch.norm and _has_norm(each) for each in a)
    return TensorsDifference(is_same, estimates, is_compared, shapes, zeros)


def _difference(one: TracedTensor, other: TracedTensor) -> Estimate:
    a, b = one.sketch, other.sketch
    assert a is not None
    assert b is not None
    are_alike = (a.nonfinite, a.places) == (b.nonfinite, b.places)
    if are_alike and not b.norm and _has_norm(one) and _has_norm(other):
        return Estimate(1.0 if a.norm else 0.0)  # zeros may have signs
    return difference(a, b)


def _has_norm(tensor: TracedTensor) -> bool:
    dtype = getattr(torch, tensor.dtype)
    return bool(dtype.is_floating_point or dtype.is_complex)


@dataclass(frozen=True, eq=False)
class CallPair:
    """A call that both runs make."""

    a: TracedCall
    b: TracedCall

    @CachedProperty
    def inputs(self) -> TensorsDifference:
        """The difference of what it takes."""
        return differences(self.a.inputs, self.b.inputs)

    @CachedProperty
    def outputs(self) -> TensorsDifference:
        """The difference of what it returns."""
        return differences(self.a.outputs, self.b.outputs)

    @CachedProperty
    def gradients(self) -> TensorsDifference:
        """The difference of the gradients that come into its results, of those in both runs."""
        a, b = self.a.gradients, self.b.gradients
        keys = sorted(a.keys() & b.keys())
        return differences([a[key] for key in keys], [b[key] for key in keys])

    @property
    def has_gradients(self) -> bool:
        """Whether gradients of a result are in both runs."""
        return bool(self.a.gradients.keys() & self.b.gradients.keys())

    @property
    def roundoff(self) -> float:
        """The largest unit roundoff of its types."""
        calls = self.a, self.b
        types = [each.dtype for call in calls for each in (*call.inputs, *call.outputs)]
        return max(map(roundoff_of, (*types, self.a.site.dtype, self.b.site.dtype)))

    @property
    def gain(self) -> float:
        """By how much it amplifies differences of its inputs; of a call of one tensor at least as ``clamp`` does."""
        return max(self.a.gain, self.b.gain, _norm_ratio(self.a)) or _UNKNOWN_GAIN

    @property
    def is_decided_alike(self) -> bool:
        """Whether the same decision gave it the same dtype."""
        return self.a.decision == self.b.decision

    @property
    def is_compiled(self) -> bool:
        """Whether a graph makes it in one of the runs."""
        return self.a.site.is_compiled or self.b.site.is_compiled


def verdict(
    found: TensorsDifference, rounding: float, gain: float, incoming: float, margin: float
) -> Verdict:
    """Returns the verdict on a difference, from sizes alone.

    Args:
        found: The difference.
        rounding: Unit roundoff of the types of what computed it; 0 if equal inputs must give equal bits.
        gain: By how much that amplifies differences.
        incoming: The relative difference of what went in.
        margin: By how much the difference may exceed its explanation.
    """
    if found.is_same:
        return Verdict("equal")
    if not found.is_compared:
        return Verdict("not compared", found.shapes)
    by_rounding = margin * rounding * math.hypot(1.0, gain)
    explained = math.hypot(by_rounding, margin * gain * incoming) if incoming else by_rounding
    explained = math.expm1(min(explained, 700.0))  # large ones grow in each other
    least = found.largest.least
    if rounding and least <= by_rounding:
        return Verdict("rounding", "", by_rounding)
    if incoming and (least <= explained or math.isinf(least)):  # integers, or zeros in a
        return Verdict("inherited", "", explained)
    if not explained:
        return Verdict("unexplained", "other bits from equal inputs")
    cause = f"its types and inputs explain at most {explained:.1e}"
    return Verdict("unexplained", cause, explained)


def norm(tensors: Iterable[TracedTensor]) -> float:
    """Returns the L2 norm of tensors."""
    return math.hypot(*[each.sketch.norm for each in tensors if each.sketch])


def _norm_ratio(call: TracedCall) -> float:
    """Returns the gain of an op of one tensor that keeps differences as they are, as ``clamp`` may; else 0."""
    if len(call.inputs) != 1 or len(call.outputs) != 1:
        return 0.0
    (given,), (made,) = call.inputs, call.outputs
    if given.shape != made.shape or not (given.sketch and made.sketch and made.sketch.norm):
        return 0.0
    return given.sketch.norm / made.sketch.norm


@cache
def roundoff_of(dtype: str) -> float:
    """Returns the unit roundoff of a dtype or number format by its name; 0 for others."""
    known = getattr(torch, dtype, None) if dtype else None
    if isinstance(known, torch.dtype):
        return torch.finfo(known).eps / 2 if known.is_floating_point else 0.0
    # Of a format that is only a function nothing is known.
    return float(getattr(get(dtype), "epsilon", 1.0)) / 2 if dtype in names() else 0.0
