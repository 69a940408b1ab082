"""What `watch` reports: an op that made values non-finite, the values around it, and a remedy that was tried."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from ..errors import brief, lined
from ..observers import OpCall
from ..places import located
from ..tensors import short_name
from ..torch_state import Phase
from .culprit import Origin, Source
from .records import NAN, NEGATIVE, POSITIVE, Trial, alive, bits_of
from .slots import exact_finite
from .trials import CONVERTING, is_emulated, is_low_call, tried_on_extremes

Kind = Literal["nan", "inf", "overflow", "underflow", "scale"]


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

    def __str__(self) -> str:
        inputs = ", ".join(map(short_name, self.input_dtypes))
        outputs = ", ".join(map(short_name, self.output_dtypes))
        return f"{self.op}({inputs}) -> {outputs}  {self.location.rpartition('/')[2]}"


@dataclass(frozen=True, slots=True)
class Offence:
    """An op that turned finite values into non-finite ones.

    Attributes:
        op: Op name; for a function that is not one of torch's ops, the name of its autograd node.
        module: Qualified name of the module whose forward made the call; ``""`` for none.
        site: The call site: ``"torch.nn.functional.linear"``.
        location: ``"train.py:12"``: the innermost line of the user's own files in the call.
        kind: ``"nan"``; ``"inf"``, which float32 also gives; ``"overflow"`` of a low-precision type or
            number format; ``"underflow"``: an input that rounding made zero; ``"scale"``: gradients
            overflow at every scale that a `torch.amp.GradScaler` tries.
        phase: ``"forward"``, ``"recompute"``, ``"backward"``, or ``"optimizer"`` for an op of `Optimizer.step`.
        step: Number of the step, from 0.
        source: ``"op"``; or where the values were non-finite before any observed op: in an
            ``"input"``, a ``"parameter"``, a ``"gradient"``.
        context: The last calls before it, the nearest last.
        ranges: Ranges of its finite inputs, and of the result's finite part. If the result is gone by then,
            its extremes, including an infinity.
        remedy: A line for an op list that prevents it, ``"fp32.txt: exp"``, tried on the same values unless
            it says otherwise; or ``"none: ..."``, and the reason.
        parameter: Qualified name of the non-finite parameter for the source ``"parameter"`` and the phase
            ``"optimizer"``; ``""`` if no running module holds it.
        state: Name of the parameter's state in its optimizer that is not finite: ``"exp_avg_sq"``; ``""`` for
            the parameter itself.
        through: The line of an installed package that made the call there, or the line that called the
            user's own `Optimizer.step`; ``""`` for none.
        cause: The earlier call whose rounding led to it, if that is not its own; None for none.

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
    phase: Phase | Literal["optimizer"]
    step: int
    source: Source = "op"
    context: tuple[EarlierCall, ...] = ()
    ranges: tuple[Range, ...] = ()
    remedy: str = ""
    parameter: str = ""
    state: str = ""
    through: str = ""
    cause: EarlierCall | None = None

    __repr__ = brief

    def __str__(self) -> str:
        lines = [f"{self._verdict()} in step {self.step}, {self.phase}"]
        if self.module:
            lines.append(f"  module   {self.module}")
        lines.append(f"  at       {located(self.location) or 'unknown'}")
        if self.through:
            lines.append(f"  through  {located(self.through)}")
        lines += [f"  {each.name:8} {each.min:.4g} .. {each.max:.4g}" for each in self.ranges]
        for position, each in enumerate(self.context):
            lines.append(f"  {'before' if position == 0 else '':8} {each}")
        if self.cause is not None:
            lines.append(f"  cause    {self.cause}")
        lines += textwrap.wrap(
            f"remedy   {self.remedy}", 80, initial_indent="  ", subsequent_indent=" " * 11
        )
        return lined(lines)

    def _verdict(self) -> str:
        named = f"the parameter {self.parameter}" if self.parameter else "a parameter"
        in_state = f" in {self.state} of {self.parameter}" if self.state else f" in {named}"
        where = {
            "op": in_state if self.phase == "optimizer" else "",
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


# --- of an origin ------------------------------------------------------------------------------------


def offence_of(origin: Origin, kind: Kind | None = None) -> Offence:
    """Returns the offence to report; its kind is ``kind`` if already known."""
    call, trial = origin.record.call, _trial_of(origin)
    return Offence(
        op=origin.node or call.op,
        module=origin.record.module,
        site=call.site,
        location=origin.record.own_location,
        kind=kind or _kind_of(origin, trial),
        phase="backward" if origin.gradients else call.phase,
        step=origin.record.step,
        source=origin.source,
        context=tuple(map(_earlier, origin.context)),
        ranges=_ranges(origin),
        remedy=_remedy_for(origin, trial),
        through="" if call.location == origin.record.own_location else call.location,
        cause=_cause_of(call, trial),
        parameter="" if origin.parameter is None else origin.parameter.name,
    )


def _earlier(call: OpCall) -> EarlierCall:
    return EarlierCall(call.op, call.module, call.location, call.cast_dtypes, call.output_dtypes)


def _cause_of(call: OpCall, trial: Trial | None) -> EarlierCall | None:
    if trial is not None and trial.loser is not None:
        return None if trial.loser is call else _earlier(trial.loser)
    causes = () if trial is None else trial.causes
    return _earlier(causes[0]) if causes and causes[0] is not call else None


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
    if origin.source != "op" or origin.node:
        return seen
    if trial is not None and (trial.causes or trial.loser is not None):
        return "underflow" if trial.is_underflow else "overflow" if seen == "inf" else seen
    if not is_low_call(call):
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
        return "none: the program gave this call NaN or an infinity as a number"
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
    if call.op in CONVERTING and origin.gradients is not None:
        dtype = str(call.input_dtypes[0]).removeprefix("torch.")
        return f"none: the gradient of {call.op} is {dtype}, as its input is; make the loss, or its scale, smaller"
    if call.op in CONVERTING and call.output_dtypes:
        return _line_for(call, (call,))
    if trial is not None and trial.is_double:
        names = ", ".join(dict.fromkeys([each.op for each in trial.causes]))
        return f"none: {names} ran in float32 already; in float64 it is finite"
    if trial is not None and trial.loser is not None:
        dtype = str(trial.loser.input_dtypes[0]).removeprefix("torch.")
        line = f"{_line_for(call, trial.causes)}; or" if trial.causes else "none in op lists:"
        lost = f"the gradient of {trial.loser.op} becomes zero in {dtype}, as its input is"
        return f"{line} make the loss, or its scale, larger: {lost}"
    if trial is not None and trial.causes:
        is_sure = "" if trial.is_known else " (tried on values that a call in place has left)"
        return _line_for(call, trial.causes) + is_sure
    if trial is not None and trial.is_cast:
        return (
            f"none: the gradient of {call.op} is cast to low precision, as its input is; make the loss, or its "
            "scale, smaller"
        )
    if not is_low_call(call):
        where = f", where {trial.where}" if trial is not None and trial.where else ""
        remedy = f"none: {call.op} ran in float32 already{where}; its inputs have to change"
        return remedy + _unrepeated(trial)
    if trial is not None and trial.bits:
        what = f"the gradient of {call.op}" if origin.gradients else call.op
        how = "is" if trial.is_sure else "may be"
        value = "NaN" if trial.bits & NAN else "infinite"
        where = f", where {trial.where}" if trial.where else ""
        found = f"{what} {how} {value} in float32, too{where}"
        if trial.is_known:
            return f"none: {found}"
        return f"{'none found' if trial.is_tried else 'unknown'}: {found}{_unrepeated(trial)}"
    line = _line_for(call, (call,), writes=origin.record.writes)
    if trial is None:
        line += " (not tried: the values that it was given are not known any more)"
    elif not trial.is_sure:
        line += " (tried on the extremes of its inputs only)"
    return line


def _unrepeated(trial: Trial | None) -> str:
    """Returns a text about earlier calls that are unknown."""
    if trial is None or trial.is_known:
        return ""
    if trial.is_tried:
        return "; earlier calls in float32 don't help, as far as their values are known"
    if trial.stopped_at is None:
        return "; calls before it that may have rounded could not be repeated"
    return f"; {trial.stopped_at.op} in {located(trial.stopped_at.location)} led to it, and could not be repeated"


def _line_for(call: OpCall, causes: Sequence[OpCall], *, writes: bool = False) -> str:
    """Returns the line that puts ``causes`` into float32, the calls that led to a failed one, or why there is none."""
    for each in causes:
        made = (*each.output_dtypes, each.dtype)[0]
        type_name = str(getattr(made, "name", made)).removeprefix("torch.")
        if each.op in CONVERTING:
            return (
                f"none: {each.op} is the program's own conversion to {type_name}; leave "
                "it out, or keep values in its range"
            )
        if writes or each.cast_policy == "TARGET":
            kept = f"{each.op} writes to a tensor of {type_name}, which keeps its dtype"
            return (
                f"none: {kept}"
                if each is call
                else f"none in op lists: {kept}; tried: that tensor in float32"
            )
    line = f"fp32.txt: {', '.join(dict.fromkeys([each.op for each in causes]))}"
    if any(each.reason == "casts are switched off" for each in causes):
        return f"none: casts are switched off here; with them on, {line}"
    return line
