"""Finds the first call with finite inputs and a non-finite result, not the ones after it.

Some infinities are intended: masks, and their smallest numbers after rounding to low precision; a softmax
turns them into zeros. So -inf is reported only once NaN or +inf follows from it, or it reaches the end of the
forward or a gradient. The same holds for NaN from infinities that the program made itself, such as a softmax
over -inf alone, and for non-finite data.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import torch

from ..errors import brief, lined
from ..places import located
from ..tensors import short_name
from ..torch_state import Phase
from .records import (
    NAN,
    NEGATIVE,
    POSITIVE,
    CallRecord,
    Cell,
    GradientRecord,
    Leaf,
    Trial,
    alive,
    bits_of,
)
from .slots import exact_finite
from .trials import CONVERTING, is_emulated, is_low_call, tried_on_extremes

Kind = Literal["nan", "inf", "overflow", "underflow", "scale"]
Source = Literal["op", "input", "parameter", "gradient"]


class Range(NamedTuple):
    """The values of a call's tensor.

    Attributes:
        name: ``"input 0"``, ``"result"``, ``"gradient"``.
        min: The smallest value.
        max: The largest value.
    """

    name: str
    min: float
    max: float

    @property
    def amax(self) -> float:
        """The largest absolute value."""
        return max(abs(self.min), abs(self.max))


class EarlierCall(NamedTuple):
    """A call before an offence.

    Attributes:
        op: Op name.
        module: Qualified name of the module.
        location: ``"train.py:12"``.
        input_dtypes: Dtypes of the floating inputs, as cast.
        output_dtypes: Dtypes of the tensors returned.
    """

    op: str
    module: str
    location: str
    input_dtypes: tuple[torch.dtype, ...]
    output_dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True, slots=True)
class Offence:
    """An op that turned finite values into non-finite ones.

    Attributes:
        op: Op name; for a function that is not one of torch's ops, the name of its autograd node.
        module: Qualified name of the innermost module; ``""`` for none.
        site: The call site: ``"torch.nn.functional.linear"``.
        location: ``"train.py:12"``.
        kind: ``"nan"``; ``"inf"``, which float32 also gives; ``"overflow"`` of a low-precision type
            or number format; ``"underflow"``: an input that rounding made zero; ``"scale"``:
            gradients overflow at every loss scale.
        phase: ``"forward"``, ``"recompute"`` or ``"backward"``.
        step: Number of the step, from 0.
        source: ``"op"``; or where the values were non-finite before any observed op: in an
            ``"input"``, a ``"parameter"``, a ``"gradient"``.
        context: The last calls before it, the nearest last.
        ranges: Ranges of its finite inputs, and of the result's finite part, or its extremes if the
            result is gone by then.
        remedy: A line for an op list that prevents it, ``"fp32.txt: exp"``, tried on the same values unless
            it says otherwise; or ``"none: ..."``, and the reason.
        parameter: Name of the parameter for the source ``"parameter"``; ``""`` if no running module
            holds it.

    Example:
        >>> x = torch.full((2,), 300.0, dtype=torch.float16)
        >>> with hmpx.convert(device_types={"cpu"}), hmpx.watch("collect") as w:
        ...     y = x * x
        >>> w.first.kind, w.first.remedy, w.first.ranges[0].amax
        ('overflow', 'fp32.txt: mul', 300.0)
    """

    op: str
    module: str
    site: str
    location: str
    kind: Kind
    phase: Phase
    step: int
    source: Source = "op"
    context: tuple[EarlierCall, ...] = ()
    ranges: tuple[Range, ...] = ()
    remedy: str = ""
    parameter: str = ""

    __repr__ = brief

    def __str__(self) -> str:
        lines = [f"{self._verdict()} in step {self.step}, {self.phase}"]
        if self.module:
            lines.append(f"  module   {self.module}")
        lines.append(f"  at       {located(self.location) or 'unknown'}")
        lines += [f"  {each.name:8} {each.min:.4g} .. {each.max:.4g}" for each in self.ranges]
        for position, each in enumerate(self.context):
            inputs = ", ".join(map(short_name, each.input_dtypes))
            outputs = ", ".join(map(short_name, each.output_dtypes))
            where = each.location.rpartition("/")[2]
            lines.append(
                f"  {'before' if position == 0 else '':8} {each.op}({inputs}) -> {outputs}  {where}"
            )
        lines += textwrap.wrap(
            f"remedy   {self.remedy}", 80, initial_indent="  ", subsequent_indent=" " * 11
        )
        return lined(lines)

    def _verdict(self) -> str:
        named = f"the parameter {self.parameter}" if self.parameter else "a parameter"
        where = {
            "op": "",
            "parameter": f" in {named}",
            "input": " in an input",
            "gradient": " in the gradient of its result",
        }
        return f"{self.op}: {_SHOWN[self.kind]}{where[self.source]}"


_SHOWN = {
    "nan": "NaN",
    "inf": "infinity",
    "overflow": "overflow",
    "underflow": "underflow to zero",
    "scale": "gradient overflow at every loss scale",
}


# --- finding the culprit -----------------------------------------------------------------------------

#: Number of earlier calls shown with an offence.
_CONTEXT: Final = 5

_WORST: Final = NAN | POSITIVE


@dataclass(slots=True, eq=False)
class Origin:
    """The first non-finite values: in this source of this call."""

    record: CallRecord
    source: Source
    bits: int
    context: tuple[EarlierCall, ...]
    node: str = ""  # name of the autograd node or function that made them, if not an op
    gradients: GradientRecord | None = None  # the gradients, if its backward made them
    parameter: str = ""  # name of the non-finite parameter, if a module holds it
    is_written: bool = False  # the program gave them as a number
    is_reported: bool = False


class OriginSearch:
    """Judges the records of steps in order; ``found`` lists the origins to report."""

    def __init__(self) -> None:
        self.found: list[Origin] = []
        self._calls: list[CallRecord] = []
        self._positions: dict[int, int] = {}
        self._last: CallRecord | None = None
        self._has_gradients = self._has_bad_gradients = False

    def judge(
        self, records: Sequence[CallRecord | GradientRecord], *, ends_step: bool
    ) -> list[Origin]:
        """Returns the offences in these records."""
        self.found = []
        calls = [each for each in records if isinstance(each, CallRecord)]
        self._calls = [*self._calls[-_CONTEXT:], *calls]
        self._positions = {id(call): position for position, call in enumerate(self._calls)}
        for record in records:
            if isinstance(record, GradientRecord):
                self._judge_gradients(record)
            else:
                self._judge_call(record)
        if ends_step:
            if not self._has_gradients:
                self._confirm_last()
            self._last, self._has_gradients, self._has_bad_gradients = None, False, False
            self._calls, self._positions = [], {}
        return self.found

    # --- calls -----------------------------------------------------------------------------------

    def _judge_call(self, record: CallRecord) -> None:
        if record.call.phase == "forward" and record.results:
            self._has_gradients = False  # another forward, if there was a backward
            self._last = record
        made = _bits(record.results)
        if not made:
            return
        had, is_unsure, origins = self._inputs(record)
        origin = origins[0] if origins else None
        if record.is_intended:
            if origin is None and made & NAN:
                origin = self._origin(record, "input", made)
                origin.is_written = True
        elif not (had or is_unsure):
            origin = self._origin(record, "op", made)
            if made & _WORST:
                self._report(origin)
        elif not had & NAN:
            if made & _WORST & ~had and origin is not None and origin.source == "op":
                self._report(origin)  # NaN or +inf has followed
            if made & NAN and origin is not None and not (origin.bits & NAN or origin.is_reported):
                origin = self._origin(record, "op", made)  # from infinities in the inputs
            if origin is None and (made & _WORST or not had):
                is_passed_on = had and not made & ~had
                origin = self._origin(record, "input" if is_passed_on else "op", made)
        for cell in record.results:
            cell.origin = origin

    def _inputs(self, record: CallRecord) -> tuple[int, bool, list[Origin]]:
        """Returns the inputs' non-finite values, whether some inputs are unknown, and the origins."""
        had, is_unsure, origins = 0, record.is_unsure, []
        for given in record.inputs:
            for cell in given.cells:
                bits = cell.bits
                if bits is None:
                    is_unsure = True
                elif bits:
                    if given.is_part or len(given.cells) > 1:
                        is_unsure = True
                    else:
                        had |= bits
                    if cell.origin is None:
                        cell.origin = self._origin_before(record, cell, bits)
                    if cell.origin is not None:
                        origins.append(cell.origin)
        return had, is_unsure, origins

    def _origin_before(self, record: CallRecord, cell: Cell, bits: int) -> Origin | None:
        """Returns the origin of values that no observed call made."""
        for source in cell.sources:
            if source.bits:
                if isinstance(source, Leaf) and source.origin is None:
                    source.origin = self._origin_outside(record, source, source.bits)
                origin: Origin | None = source.origin
                return origin
        return self._origin_outside(record, cell, bits)

    def _origin_outside(self, record: CallRecord, cell: Cell, bits: int) -> Origin | None:
        """Returns the origin of data or a parameter; None for values that are likely intended."""
        if isinstance(cell, Leaf):
            if not bits & _WORST:
                return None
            origin = self._origin(record, "parameter", bits)
            origin.parameter = cell.name
            return origin
        if cell.maker is None or not (cell.maker or bits & NAN):
            return None
        return self._origin(record, "input", bits, node=cell.maker)

    def _confirm_last(self) -> None:
        """Reports the cause of non-finite values in the last result of the forward."""
        for cell in [] if self._last is None else self._last.results:
            origin = cell.origin
            if cell.bits and origin is not None:
                # -inf in a tensor that a call wrote only a part of, as 0 into a tensor of -inf: it was there.
                is_meant = origin.is_written or (
                    origin.record.is_unsure and not origin.bits & _WORST
                )
                if not is_meant:
                    self._report(origin)

    # --- gradients -------------------------------------------------------------------------------

    def _judge_gradients(self, record: GradientRecord) -> None:
        call = record.record
        if not self._has_gradients:
            self._has_gradients = True
            for cell in call.results:  # of the loss
                if cell.bits and cell.origin is not None:
                    self._report(cell.origin)
            self._confirm_last()
        arrived, computed = _bits(record.before), _bits(record.after)
        if not (arrived or computed):
            return
        is_new = not (arrived and self._has_bad_gradients)
        self._has_bad_gradients = True
        if not is_new or call.is_blamed:  # several of its nodes pass on gradients
            return
        call.is_blamed = True
        cells = [cell for given in call.inputs for cell in given.cells] + call.results
        origins = [cell.origin for cell in cells if cell.bits and cell.origin is not None]
        if origins:
            self._report(origins[0])
        else:
            source: Source = "gradient" if arrived else "op"
            origin = self._origin(call, source, arrived or computed, node=record.node)
            origin.gradients = record
            self._report(origin)

    # --- origins ---------------------------------------------------------------------------------

    def _origin(self, record: CallRecord, source: Source, bits: int, node: str = "") -> Origin:
        end = self._positions.get(id(record), len(self._calls))
        calls = [each.call for each in self._calls[max(0, end - _CONTEXT) : end]]
        context = [
            EarlierCall(each.op, each.module, each.location, each.cast_dtypes, each.output_dtypes)
            for each in calls
        ]
        return Origin(record, source, bits, tuple(context), node=node)

    def _report(self, origin: Origin) -> None:
        if not origin.is_reported:
            origin.is_reported = True
            self.found.append(origin)


def _bits(cells: Iterable[Cell]) -> int:
    found = 0
    for cell in cells:
        found |= cell.bits or 0
    return found


# --- reports -----------------------------------------------------------------------------------------


def offence_of(origin: Origin, kind: Kind | None = None) -> Offence:
    """Returns the offence to report; its kind is ``kind`` if already known."""
    call, trial = origin.record.call, _trial_of(origin)
    return Offence(
        op=origin.node or call.op,
        module=call.module,
        site=call.site,
        location=call.location,
        kind=kind or _kind_of(origin, trial),
        phase="backward" if origin.gradients else call.phase,
        step=origin.record.step,
        source=origin.source,
        context=origin.context,
        ranges=_ranges(origin),
        remedy=_remedy_for(origin, trial),
        parameter=origin.parameter,
    )


def _ranges(origin: Origin) -> tuple[Range, ...]:
    """Returns the ranges of finite inputs, of incoming gradients, and of results.

    A result whose values are still there has the range of the finite ones; another one has its extremes.
    """
    record, found = origin.record, []
    for position, given in enumerate(record.inputs):
        cell = given.cells[0]
        if len(given.cells) == 1 and cell.bits == 0 and cell.extremes is not None:
            found.append(Range(f"input {position}", *cell.extremes))
    if origin.gradients is not None:
        passed = {"gradient": origin.gradients.before, "result": origin.gradients.after}
        found += [
            Range(name, *cell.extremes)
            for name, cells in passed.items()
            for cell in cells
            if cell.extremes is not None and not cell.bits
        ]
        return tuple(found)
    parts = [exact_finite(alive(reference), version) for reference, version in record.alive]
    results = [each for each in parts if each is not None] or [
        each
        for each in [cell.extremes for cell in record.results]
        if each and bits_of(each) in (POSITIVE, NEGATIVE) and any(map(math.isfinite, each))
    ]
    return (*found, *[Range("result", *each) for each in results])


def _trial_of(origin: Origin) -> Trial | None:
    """Returns the call's outcome in float32; None if it could not be tried."""
    record, gradients = origin.record, origin.gradients
    found = record.trial if gradients is None else gradients.trial
    if found is not None or record.outline is None or origin.source != "op" or origin.node:
        return found
    cells = [given.cells[0] for given in record.inputs if len(given.cells) == 1]
    inputs = [each.extremes for each in cells if not each.bits and each.extremes is not None]
    before = [] if gradients is None else gradients.before
    arrived = [each.extremes for each in before if each.extremes is not None]
    if len(inputs) != len(record.inputs) or len(arrived) != (gradients is not None):
        return None
    return tried_on_extremes(record.call, record.outline, inputs, *arrived)


def _kind_of(origin: Origin, trial: Trial | None) -> Kind:
    call = origin.record.call
    seen: Kind = "nan" if origin.bits & NAN else "inf"
    if origin.source != "op" or origin.node or not is_low_call(call):
        return seen
    if trial is not None and trial.bits:
        return "nan" if trial.bits & NAN else "inf"
    if seen == "nan" and not is_emulated(call):
        return seen
    return "underflow" if trial is not None and trial.is_underflow else "overflow"


def _remedy_for(origin: Origin, trial: Trial | None) -> str:
    """Returns a line for an op list, or why there is none."""
    call = origin.record.call
    if origin.is_written:
        return "none: the program wrote NaN here itself"
    if origin.source in ("input", "parameter"):
        what = "the parameter" if origin.source == "parameter" else "an input"
        return f"none: {what} was not finite before any op that was seen"
    if origin.source == "gradient":
        return (
            "none: the gradient came from something else than an op: the loss, a hook, a "
            "torch.autograd.Function, or a sum of gradients"
        )
    if origin.node:
        return f"none: {origin.node} is not an op of torch"
    made = (*call.output_dtypes, call.dtype)[0]
    type_name = str(getattr(made, "name", made)).removeprefix("torch.")
    if call.op in CONVERTING:
        return (
            f"none: {call.op} is the program's own conversion to {type_name}; leave "
            "it out, or keep values in its range"
        )
    if not is_low_call(call):
        return f"none: {call.op} ran in float32 already; its inputs have to change"
    if trial is not None and trial.bits:
        what = f"the gradient of {call.op}" if origin.gradients else call.op
        how = "is" if trial.is_sure else "may be"
        value = "NaN" if trial.bits & NAN else "infinite"
        where = f", where {trial.where}" if trial.where else ""
        return f"none: {what} {how} {value} in float32, too{where}"
    if origin.record.writes or call.cast_policy == "TARGET":
        return f"none: {call.op} writes to a tensor of {type_name}, which keeps its dtype"
    line = f"fp32.txt: {call.op}"
    if trial is None:
        line += " (not tried: the values that it was given are not known any more)"
    elif not trial.is_sure:
        line += " (tried on the extremes of its inputs only)"
    if call.reason == "casts are switched off":
        return f"none: casts are switched off here; with them on, {line}"
    return line
