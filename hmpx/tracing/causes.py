"""Causes that two traces show of a difference other than rounding and size, call by call in the order of the runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Final

from .aligning import Side
from .judging import CallPair, differences, roundoff_of
from .reading import TracedCall, TracedOptimizer, TracedTensor
from .sketches import Estimate

#: Units of roundoff by which a tensor that no call made may differ once results differ: other code may have made
#: it from them.
OUTSIDE: Final = 64.0


class Causes:
    """Names causes. A cause is named once, where it is first met, so what is met before matters.

    Attributes:
        has_differed: Whether any row so far has, or what no call made may.
        coarsest: The largest unit roundoff that explained a result so far.
    """

    def __init__(self, a: Side, b: Side, first: Iterable[CallPair]) -> None:
        """Looks for causes in two runs; ``first`` are the calls of the first step."""
        self._a, self._b = a, b
        self.has_differed = a.is_compiled or b.is_compiled
        self.coarsest = 0.0
        self._has_other_types = False
        self._named: set[TracedTensor] = set()  # of a, made elsewhere, whose difference is known
        self._first_users: dict[
            str, TracedCall
        ] = {}  # of parameters; later optimizers write to them
        for pair in first:
            for each in pair.a.inputs:
                self._first_users.setdefault(a.origin(each)[0].name, pair.a)

    def of(self, pair: CallPair) -> str:
        """Returns why results differ other than by rounding and size; ``""`` if nothing shows it."""
        a, b = pair.a, pair.b
        if len(a.inputs) != len(b.inputs) or len(a.outputs) != len(b.outputs):
            return f"tensors: {len(a.inputs)} in a, {len(b.inputs)} in b"
        return (
            self._outside(pair)
            or self._arguments(a.site.arguments, b.site.arguments)
            or self._types(pair)
            or _nonfinite(a, b)
            or ("results of other shapes" if pair.inputs.is_same and pair.outputs.shapes else "")
        )

    def _outside(self, pair: CallPair) -> str:
        """Names an input that other code than the traced calls made, or converted or sliced otherwise."""
        for one, other in zip(pair.a.inputs, pair.b.inputs, strict=True):
            (first, maker), (second, other_maker) = self._a.origin(one), self._b.origin(other)
            is_made = maker is not None and other_maker is not None
            if is_made:
                if not differences([first], [second]).is_same:
                    continue  # its maker's row says why
                first, second = one, other
            found = differences([first], [second])
            if found.is_same or not found.is_compared or first in self._named:
                continue
            self._named.add(first)
            roundoff = max(
                roundoff_of(name)
                for each in (first, second)
                for name in (each.dtype, each.contents)
            )
            is_low = (first.dtype, first.contents) != (second.dtype, second.contents)
            is_rounded = is_low and found.largest.least <= 2 * roundoff
            if is_rounded and not is_made and first.dtype != second.dtype:
                self._has_other_types = True
            if is_rounded and self._has_other_types:
                continue
            if (maker is None) != (
                other_maker is None
            ) and self._a.is_compiled != self._b.is_compiled:
                continue  # a call that the graph leaves out made it
            low = second.contents or first.contents
            values = (
                f": {low} values in {'b' if second.contents else 'a'}" if is_low and low else ""
            )
            if is_made:
                made = maker.site.op if maker else ""
                return f"what {made} returned is converted or sliced otherwise{values}"
            if first.name:
                is_explained = self._first_users.get(first.name) is not pair.a
            else:
                is_explained = found.largest.least <= OUTSIDE * max(roundoff, self.coarsest)
            if not (is_explained and self.has_differed):
                name = first.name or f"a {first.kind} tensor made outside of the traced calls"
                return f"{name} differs{_by(found.largest)}{values}"
        return ""

    def _arguments(self, a: str, b: str) -> str:
        """Names other arguments, unless they may be computed from tensors, or from a dtype's range."""
        is_near = len(a.split(", ")) == len(b.split(", ")) and all(
            itertools.starmap(_is_near, zip(a.split(", "), b.split(", "), strict=True))
        )
        if a == b or (is_near and (self.has_differed or self._has_other_types)):
            return ""
        return f"arguments: {a} in a, {b} in b"

    def _types(self, pair: CallPair) -> str:
        """Names types that differ though all calls so far, and what decided them, have the same."""
        self._has_other_types |= not pair.is_decided_alike
        if self._has_other_types:
            return ""
        a, b = pair.a, pair.b
        for said, ours, theirs in (
            ("takes", a.inputs, b.inputs),
            ("returns", a.outputs, b.outputs),
        ):
            for one, other in zip(ours, theirs, strict=True):
                if one.dtype != other.dtype:
                    self._has_other_types = True
                    return f"{said} {one.dtype} in a, {other.dtype} in b"
        return ""


def other_settings(a: TracedOptimizer, b: TracedOptimizer) -> str:
    """Returns how two optimizers' settings differ: ``"lr: 0.001 in a, 0.0011 in b"``; ``""`` if they don't."""
    if a.name != b.name:
        return f"class: {a.name} in a, {b.name} in b"
    if len(a.groups) != len(b.groups):
        return f"groups of parameters: {len(a.groups)} in a, {len(b.groups)} in b"
    found = [
        f"{name}: {one.get(name, 'none')} in a, {other.get(name, 'none')} in b"
        for one, other in zip(a.groups, b.groups, strict=True)
        for name in {**one, **other}
        if one.get(name) != other.get(name)
    ]
    return "; ".join(dict.fromkeys(found))


def _nonfinite(a: TracedCall, b: TracedCall) -> str:
    """Names results of which other numbers are not finite, though of the inputs the same are."""
    inputs, outputs = (
        [sum(each.sketch.nonfinite for each in tensors if each.sketch) for tensors in several]
        for several in ((a.inputs, b.inputs), (a.outputs, b.outputs))
    )
    if inputs[0] == inputs[1] and outputs[0] != outputs[1]:
        return f"values that are not finite: {outputs[0]} in a, {outputs[1]} in b"
    return ""


def _by(found: Estimate) -> str:
    return f" by {found.rel:.1e}" if math.isfinite(found.rel) else ""


def _is_near(a: str, b: str) -> bool:
    try:
        return math.isclose(float(a.strip("()")), float(b.strip("()")), rel_tol=0.1)
    except ValueError:
        return a == b
