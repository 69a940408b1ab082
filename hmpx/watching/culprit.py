"""Finds the first call with finite inputs and a non-finite result, not the ones after it.

Some infinities are intended: masks, and their smallest numbers after rounding to low precision; a softmax
turns them into zeros. So -inf, and +inf that float32 gives, too, are reported only once NaN follows from them, or
they reach the end of the forward or a gradient. The same holds for NaN from infinities that the program made itself, such as a softmax
over -inf alone, and for non-finite data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from ..observers import OpCall
from ..ops import facts
from .records import NAN, POSITIVE, CallRecord, Cell, GradientRecord, Leaf
from .trials import is_low_call

Source = Literal["op", "input", "parameter", "gradient"]

#: Number of earlier calls shown with an offence.
_CONTEXT: Final = 5

_WORST: Final = NAN | POSITIVE


@dataclass(slots=True, eq=False)
class Origin:
    """The first non-finite values: in this source of this call."""

    record: CallRecord
    source: Source
    bits: int
    context: tuple[OpCall, ...]
    node: str = ""  # name of the autograd node or function that made them, if not an op
    gradients: GradientRecord | None = None  # the gradients, if its backward made them
    parameter: Leaf | None = None  # the non-finite one, for this source
    is_written: bool = False  # the program gave them as a number
    may_matter: bool = False  # its NaN is reported unless it is cleared
    is_reported: bool = False


class OriginSearch:
    """Judges the records of steps in order; ``found`` lists the origins to report."""

    def __init__(
        self, living: Callable[[], Iterable[Cell]], is_named: Callable[[CallRecord], bool]
    ) -> None:
        self._living = living  # the cells of memory that is in use
        self._is_named = is_named  # whether a result is a module's parameter or buffer
        self.found: list[Origin] = []
        self.number: Origin | None = (
            None  # that made a number of these records non-finite, such as a rate
        )
        self._calls: list[CallRecord] = []
        self._positions: dict[int, int] = {}
        self._last: CallRecord | None = None
        self._has_gradients = self._has_bad_gradients = False
        self._trains = False
        self._nans: list[tuple[Origin, CallRecord]] = []  # made by ops; some do not matter
        self._taken: set[Cell] = set()  # by a later call
        self._checked: set[Cell] = set()  # by the program itself
        self._lost_at: set[str] = set()  # places whose backward gave zeros alone
        self._bad_backwards: list[Origin] = []  # that a later one may clear
        self._bad_gradients: set[Cell] = set()  # that no later backward got

    def judge(
        self, records: Sequence[CallRecord | GradientRecord], *, ends_step: bool, trains: bool
    ) -> list[Origin]:
        """Returns the offences in these records, of a program that trains or not."""
        self.found, self._trains, self.number = [], trains, None
        calls = [each for each in records if isinstance(each, CallRecord)]
        self._calls = [*self._calls[-_CONTEXT:], *calls]
        self._positions = {id(call): position for position, call in enumerate(self._calls)}
        passed = [each for each in records if isinstance(each, GradientRecord)]
        lost = next((each for each in passed if each.trial and each.trial.loser), None)
        place = "" if lost is None else lost.record.own_location
        if lost and place not in self._lost_at and not any(map(_reaches_a_leaf, passed)):
            self._lost_at.add(place)
            origin = self._origin(lost.record, "op", 0)
            origin.gradients = lost
            self._report(origin)
        for record in records:
            if isinstance(record, GradientRecord):
                self._judge_gradients(record)
            else:
                self._judge_call(record)
        if ends_step:
            if not self._has_gradients:
                self._confirm_last()
            for origin, record in self._nans:
                is_cleared = self._taken.issuperset(record.results)
                is_outside = self._trains and origin.record.is_outside
                is_metric = (is_outside or self._is_metric(record)) and not _is_lost(origin)
                if not is_cleared and (not is_metric or self._is_named(record)):
                    self._report(origin)
            for origin in self._bad_backwards if self._bad_gradients else ():
                self._report(origin)  # else all were cleared, as by a mask's backward
            self._bad_backwards, self._bad_gradients = [], set()
            self._nans, self._taken, self._checked = [], set(), set()
            self._last, self._has_gradients, self._has_bad_gradients = None, False, False
            self._calls, self._positions = [], {}
        return self.found

    # --- calls -----------------------------------------------------------------------------------

    def _judge_call(self, record: CallRecord) -> None:
        if record.call.phase == "forward" and record.results:
            self._has_gradients = False  # another forward, if there was a backward
            self._last = record
        cells = [cell for given in record.inputs for cell in given.cells]
        if record.is_check:
            self._checked.update(cells)
            return
        self._taken.update(cells)
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
            origin.may_matter = bool(made & NAN)
            self.number = origin if record.is_metric else self.number
            if made & POSITIVE and _is_rounded(record):
                self._report(origin)
        elif not had & NAN:
            if made & NAN and origin is not None and origin.source == "op":
                origin.may_matter = True  # NaN has followed
            is_known = origin is not None and (
                origin.bits & NAN or origin.may_matter or origin.is_reported
            )
            if made & NAN and origin is not None and not is_known:
                origin = self._origin(record, "op", made)  # from infinities in the inputs
            if origin is None and (made & _WORST or not had):
                is_passed_on = had and not made & ~had
                origin = self._origin(record, "input" if is_passed_on else "op", made)
        for cell in record.results:
            cell.origin = origin
        if origin is not None and origin.may_matter:
            self._nans.append((origin, record))

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
                if origin is None or origin.source == "op" or not isinstance(cell, Leaf):
                    return origin
        return self._origin_outside(record, cell, bits)

    def _origin_outside(self, record: CallRecord, cell: Cell, bits: int) -> Origin | None:
        """Returns the origin of data or a parameter; None for values that are likely intended."""
        if isinstance(cell, Leaf):
            if not bits & _WORST:
                return None
            origin = self._origin(record, "parameter", bits)
            origin.parameter = cell
            return origin
        if cell.maker == "" and bits & _WORST:  # indexing is not observed
            since = 0 if bits & NAN else record.step - 1  # programs have infinities of their own
            for each in self._living():
                made: Origin | None = each.origin
                is_alike = bool((each.bits or 0) & bits)
                if is_alike and made and made.source == "op" and made.record.step >= since:
                    return made
        if cell.maker is None or not (cell.maker or bits & NAN):
            return None
        return self._origin(record, "input", bits, node=cell.maker)

    def _confirm_last(self) -> None:
        """Reports the cause of non-finite values in the last result of the forward."""
        last = self._last
        for cell in [] if last is None or self._is_metric(last) else last.results:
            origin = cell.origin
            if cell.bits and origin is not None:
                # -inf in a tensor that a call wrote only a part of, as 0 into a tensor of -inf: it was there.
                is_meant = origin.is_written or (
                    origin.record.is_unsure
                    and (not origin.bits & _WORST or _only_stores(origin.record))
                )
                if not is_meant:
                    self._report(origin)

    def _is_metric(self, record: CallRecord) -> bool:
        """Whether a call gave a number, or a ratio outside of modules, from which nothing is learnt, in training."""
        return self._trains and record.is_metric

    # --- gradients -------------------------------------------------------------------------------

    def _judge_gradients(self, record: GradientRecord) -> None:
        call = record.record
        if not self._has_gradients:
            self._has_gradients = True
            self._taken |= self._checked  # the program has left it out, and went on
            for cell in call.results:  # of the loss
                if cell.bits and cell.origin is not None:
                    self._report(cell.origin)
            self._confirm_last()
        arrived, computed = _bits(record.before), _bits(record.after)
        self._bad_gradients.difference_update(record.before)
        self._bad_gradients.update(each for each in record.after if each.bits)
        if not (arrived or computed):
            return
        is_new = not (arrived and self._has_bad_gradients)
        self._has_bad_gradients = True
        if not is_new or call.is_blamed:  # several of its nodes pass on gradients
            return
        call.is_blamed = True
        cells = [cell for given in call.inputs for cell in given.cells] + call.results
        if not arrived:  # ops that the program's own backward calls
            cells = [*record.after, *cells]
        origins = [cell.origin for cell in cells if cell.bits and cell.origin is not None]
        if origins:
            origin = origins[0]
        else:
            source: Source = "gradient" if arrived else "op"
            origin = self._origin(call, source, arrived or computed, node=record.node)
            origin.gradients = record
        if arrived:
            self._report(origin)
        else:
            self._bad_backwards.append(origin)

    # --- origins ---------------------------------------------------------------------------------

    def _origin(self, record: CallRecord, source: Source, bits: int, node: str = "") -> Origin:
        end = self._positions.get(id(record), len(self._calls))
        context = tuple([each.call for each in self._calls[max(0, end - _CONTEXT) : end]])
        return Origin(record, source, bits, context, node=node)

    def _report(self, origin: Origin) -> None:
        if not origin.is_reported:
            origin.is_reported = True
            self.found.append(origin)


def _reaches_a_leaf(record: GradientRecord) -> bool:
    """Whether a call with a parameter or another leaf computed gradients other than zero."""
    has_leaf = any(isinstance(each.cells[0], Leaf) for each in record.record.inputs)
    return has_leaf and any(each.bits or any(each.extremes or ()) for each in record.after)


def _only_stores(record: CallRecord) -> bool:
    """Whether a call wrote finite values to a part of a tensor, as they are."""
    call = record.call
    return record.writes and call.op in facts("stored_numbers") and len({*call.input_dtypes}) == 1


def _is_lost(origin: Origin) -> bool:
    """Whether an op has failed only because of low precision: it was tried in float32."""
    trial = origin.record.trial
    return origin.source == "op" and trial is not None and not (trial.bits or trial.is_double)


def _is_rounded(record: CallRecord) -> bool:
    """Whether the call failed because of low precision, as far as known."""
    trial = record.trial
    if trial is None:
        return is_low_call(record.call)
    return not (trial.bits or trial.is_double)


def _bits(cells: Iterable[Cell]) -> int:
    found = 0
    for cell in cells:
        found |= cell.bits or 0
    return found
