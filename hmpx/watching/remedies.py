"""What kind of fault an offence is, and which line of an op list would have prevented it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..tensors import Named
from .offences import Kind
from .records import NAN, Trial
from .trials import CONVERTING, is_emulated, is_low_call, tried_on_extremes

if TYPE_CHECKING:
    from .judging import Origin


def trial_of(origin: Origin) -> Trial | None:
    """Returns what the call that went wrong gives in float32; None if it could not be tried."""
    record = origin.record
    found = origin.trial if origin.is_backward else record.trial
    if found is not None or record.outline is None or origin.source != "op" or origin.node:
        return found
    cells = [given.cells[0] for given in record.inputs if len(given.cells) == 1]
    inputs = [each.extremes for each in cells if not each.bits and each.extremes is not None]
    arrived = [each.extremes for each in origin.before if each.extremes is not None]
    if len(inputs) != len(record.inputs) or len(arrived) != origin.is_backward:
        return None
    return tried_on_extremes(record.call, record.outline, inputs, *arrived)


def kind_of(origin: Origin, trial: Trial | None) -> Kind:
    """Returns the kind of an offence."""
    call = origin.record.call
    seen: Kind = "nan" if origin.bits & NAN else "inf"
    if origin.source != "op" or origin.node or not is_low_call(call):
        return seen
    if trial is not None and trial.bits:
        return "nan" if trial.bits & NAN else "inf"
    if seen == "nan" and not is_emulated(call):
        return seen
    return "underflow" if trial is not None and trial.is_underflow else "overflow"


def remedy_for(origin: Origin, trial: Trial | None) -> str:
    """Returns a line for an op list, or why none helps."""
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
    if call.op in CONVERTING:
        return (
            f"none: {call.op} is the program's own conversion to {_name(*call.output_dtypes)}; leave "
            "it out, or keep values in its range"
        )
    if not is_low_call(call):
        return f"none: {call.op} ran in float32 already; its inputs have to change"
    if trial is not None and trial.bits:
        what = f"the gradient of {call.op}" if origin.is_backward else call.op
        how = "is" if trial.is_sure else "may be"
        value = "NaN" if trial.bits & NAN else "infinite"
        where = f", where {trial.where}" if trial.where else ""
        return f"none: {what} {how} {value} in float32, too{where}"
    if origin.record.writes or call.cast_policy == "TARGET":
        return (
            f"none: {call.op} writes to a tensor of {_name(*call.output_dtypes, call.dtype)}, which "
            "keeps its dtype"
        )
    line = f"fp32.txt: {call.op}"
    if trial is None:
        line += " (not tried: the values that it was given are not known any more)"
    elif not trial.is_sure:
        line += " (tried on the extremes of its inputs only)"
    if call.reason == "casts are switched off":
        return f"none: casts are switched off here; with them on, {line}"
    return line


def _name(dtype: torch.dtype | Named | None, *_: Any) -> str:
    return str(getattr(dtype, "name", dtype)).removeprefix("torch.")
