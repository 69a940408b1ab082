"""Who is to blame: the first call with finite inputs and a non-finite result, and not those after it.

Some infinities are meant: masks, and what low precision makes of their smallest numbers; a softmax makes
zeros of them. So the verdict on -inf waits: it is reported once NaN or +inf follows from it, or if it
reaches the end of the forward, or a gradient. So does that on NaN out of infinities that the program
made itself, as of a softmax over -inf alone, and that on what came in with data.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from .offences import EarlierCall, Kind, Offence, Range, Source
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
from .remedies import kind_of, remedy_for, trial_of
from .slots import exact_finite

#: How many calls before an offence it shows.
_CONTEXT = 5

_WORST = NAN | POSITIVE


@dataclass(slots=True, eq=False)
class Origin:
    """Where non-finite values first were.

    Attributes:
        record: The call.
        source: What of it had them.
        bits: Which they were.
        context: The calls before it.
        before: The gradients that arrived at the call, and
        after: those that it computed, if it is these.
        node: Name of the autograd node, or of the function, that made them, if no op did.
        parameter: Name of the parameter that had them, if it is one that a module holds.
        trial: What the backward gave in float32, if it was tried.
        is_written: The program gave them as a number.
        is_reported: It has been reported.
    """

    record: CallRecord
    source: Source
    bits: int
    context: tuple[EarlierCall, ...]
    before: tuple[Cell, ...] = ()
    after: tuple[Cell, ...] = ()
    node: str = ""
    parameter: str = ""
    is_backward: bool = False
    trial: Trial | None = None
    is_written: bool = False
    is_reported: bool = False


class Judge:
    """Judges the records of steps in their order.

    Attributes:
        found: What is to be reported, in the order of events.
    """

    def __init__(self) -> None:
        """Starts with nothing found."""
        self.found: list[Origin] = []
        self._calls: deque[CallRecord] = deque(maxlen=_CONTEXT)
        self._records: list[CallRecord | GradientRecord] = []
        self._last: CallRecord | None = None
        self._has_gradients = self._has_bad_gradients = False

    def judge(
        self, records: Iterable[CallRecord | GradientRecord], *, ends_step: bool
    ) -> list[Origin]:
        """Returns what is to be reported of these records."""
        self.found, self._records = [], list(records)
        for record in self._records:
            if isinstance(record, GradientRecord):
                self._judge_gradients(record)
            else:
                self._judge_call(record)
                self._calls.append(record)
        self._records = []
        if ends_step:
            if not self._has_gradients:
                self._confirm_last()
            self._last, self._has_gradients, self._has_bad_gradients = None, False, False
            self._calls.clear()
        return self.found

    # --- calls -----------------------------------------------------------------------------------

    def _judge_call(self, record: CallRecord) -> None:
        if record.call.phase == "forward" and record.results:
            if self._has_gradients:  # another forward, after a backward
                self._has_gradients = False
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
                origin = self._origin(record, "op", made)  # of infinities that came in
            if origin is None and (made & _WORST or not had):
                is_passed_on = had and not made & ~had
                origin = self._origin(record, "input" if is_passed_on else "op", made)
        for cell in record.results:
            cell.origin = origin

    def _inputs(self, record: CallRecord) -> tuple[int, bool, list[Origin]]:
        """Returns the non-finite values that inputs had, whether some aren't known, and their origins."""
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
        """Returns the origin of what no observed call has made."""
        for source in cell.sources:
            if source.bits:
                if isinstance(source, Leaf) and source.origin is None:
                    source.origin = self._origin_outside(record, source, source.bits)
                origin: Origin | None = source.origin
                return origin
        return self._origin_outside(record, cell, bits)

    def _origin_outside(self, record: CallRecord, cell: Cell, bits: int) -> Origin | None:
        """Returns the origin of what no observed call has made; None for what is likely to be meant."""
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
        """Reports what the last result of the forward suffers from."""
        for cell in [] if self._last is None else self._last.results:
            origin = cell.origin
            if cell.bits and origin is not None:
                # -inf in what a call only wrote a part of, as 0 into a tensor of -inf: it was there.
                is_meant = origin.is_written or (
                    origin.record.is_unsure and not origin.bits & _WORST
                )
                if not is_meant:
                    self._report(origin)

    # --- gradients -------------------------------------------------------------------------------

    def _judge_gradients(self, record: GradientRecord) -> None:
        if not self._has_gradients:
            self._has_gradients = True
            self._confirm(record.record.results)  # of the loss
            self._confirm_last()
        arrived, computed = _bits(record.before), _bits(record.after)
        if not (arrived or computed):
            return
        is_new = not (arrived and self._has_bad_gradients)
        self._has_bad_gradients = True
        if not is_new:
            return
        call = record.record
        if call.is_blamed:  # several of its nodes hand on gradients
            return
        call.is_blamed = True
        cells = [cell for given in call.inputs for cell in given.cells] + call.results
        origins = [cell.origin for cell in cells if cell.bits and cell.origin is not None]
        if origins:
            self._report(origins[0])
        else:
            context = self._context_of(call)
            source: Source = "gradient" if arrived else "op"
            origin = Origin(
                call,
                source,
                arrived or computed,
                context,
                tuple(record.before),
                tuple(record.after),
                record.node,
                is_backward=True,
                trial=record.trial,
            )
            self._report(origin)

    def _confirm(self, cells: Iterable[Cell]) -> None:
        for cell in cells:
            if cell.bits and cell.origin is not None:
                self._report(cell.origin)

    # --- origins ---------------------------------------------------------------------------------

    def _origin(self, record: CallRecord, source: Source, bits: int, node: str = "") -> Origin:
        context = tuple([_earlier(each) for each in self._calls])
        return Origin(record, source, bits, context, node=node)

    def _context_of(self, call: CallRecord) -> tuple[EarlierCall, ...]:
        """Returns the calls before one of these records."""
        calls = [each for each in self._records if isinstance(each, CallRecord)]
        if call in calls:
            end = calls.index(call)
            calls = calls[max(0, end - _CONTEXT) : end]
        return tuple([_earlier(each) for each in calls[-_CONTEXT:]])

    def _report(self, origin: Origin) -> None:
        if not origin.is_reported:
            origin.is_reported = True
            self.found.append(origin)


def offence_of(origin: Origin, kind: Kind | None = None) -> Offence:
    """Returns the offence to report; ``kind`` if it is already known."""
    call, record = origin.record.call, origin.record
    ranges = _ranges(origin)
    trial = trial_of(origin)
    found = kind_of(origin, trial) if kind is None else kind
    return Offence(
        op=origin.node or call.op,
        module=call.module,
        site=call.site,
        location=call.location,
        kind=found,
        phase="backward" if origin.is_backward else call.phase,
        step=record.step,
        source=origin.source,
        context=origin.context,
        ranges=ranges,
        remedy=remedy_for(origin, trial),
        parameter=origin.parameter,
    )


def _ranges(origin: Origin) -> tuple[Range, ...]:
    """Returns the ranges of finite inputs, of gradients that arrived, and of results.

    Of a result that still has its values it is that of the finite ones; of another one its extremes.
    """
    record, found = origin.record, []
    for position, given in enumerate(record.inputs):
        cell = given.cells[0]
        if len(given.cells) == 1 and cell.bits == 0 and cell.extremes is not None:
            found.append(Range(f"input {position}", *cell.extremes))
    if origin.is_backward:
        for name, cells in (("gradient", origin.before), ("result", origin.after)):
            found += [
                Range(name, *cell.extremes)
                for cell in cells
                if cell.extremes is not None and not cell.bits
            ]
        return tuple(found)
    for reference, version in record.alive:
        part = exact_finite(alive(reference), version)
        if part is not None:
            found.append(Range("result", *part))
    if not any(each.name == "result" for each in found):
        for cell in record.results:
            extremes = cell.extremes
            if extremes is None or bits_of(extremes) not in (POSITIVE, NEGATIVE):
                continue
            if any(map(math.isfinite, extremes)):
                found.append(Range("result", *extremes))
    return tuple(found)


def _bits(cells: Iterable[Cell]) -> int:
    found = 0
    for cell in cells:
        found |= cell.bits or 0
    return found


def _earlier(record: CallRecord) -> EarlierCall:
    call = record.call
    return EarlierCall(call.op, call.module, call.location, call.cast_dtypes, call.output_dtypes)
