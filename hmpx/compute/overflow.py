"""A warning about values that overflow in calls in number formats."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import warn
from ..number_formats import Format, Rounder
from ..patching import unpatched
from ..tensors import PLAIN_TENSORS
from ..torch_internals import dispatch_modes, transforms
from ..torch_state import in_force, place, without_casts

# Unpatched: op lists may name any of them.
_sum, _isfinite, _and, _not = unpatched(
    torch.sum, torch.isfinite, torch.logical_and, torch.logical_not
)
_where, _abs, _amax = unpatched(torch.where, torch.abs, torch.amax)


#: The conversion that has warned.
_warned: object = None


def may_overflow(format: Format, overflow: str | None) -> bool:
    """Whether values beyond the format's largest become infinite or NaN."""
    return (overflow or format.default_overflow) != "saturate"


def warning_of_overflow(round_: Rounder, format: Format, op: str, what: str, line: str) -> Rounder:
    """Makes ``round_`` warn, once per conversion, if it makes finite values infinite or NaN.

    On the CPU only: reading values elsewhere would synchronize the device. It checks the sum of the
    rounded values, in a tenth to a third of the time of rounding. ``what`` is their role: ``"an input"``.
    """

    def round_and_look(tensor: Tensor) -> Tensor:
        global _warned
        result = round_(tensor)
        if torch.compiler.is_dynamo_compiling():
            return result
        if (
            type(result) in PLAIN_TENSORS
            and result.is_cpu
            and _warned is not in_force()
            and not dispatch_modes()
            and transforms() is None
            and not math.isfinite(_sum(result).item())  # NaN and infinity stay in a sum
        ):
            most = _largest_lost(tensor, result)
            if most is not None:
                _warned = in_force()
                warn(_message(format, op, what, line, most))
        return result

    return round_and_look


def _largest_lost(tensor: Tensor, result: Tensor) -> float | None:
    with torch.no_grad(), without_casts():
        is_lost = _and(_isfinite(tensor), _not(_isfinite(result)))
        if not is_lost.any().item():
            return None
        return float(_amax(_abs(_where(is_lost, tensor, 0.0))).item())


def _message(format: Format, op: str, what: str, line: str, most: float) -> str:
    module = place().path
    limit = f", whose largest is {format.max:g}," if hasattr(format, "max") else ""
    return (
        f"{op}{f' in {module}' if module else ''}: {what} of {most:.4g} is beyond {format.name}{limit} and "
        'became infinite or NaN; convert(overflow="saturate"), or overflow=saturate on the op\'s line '
        f"({line or 'a rule'}), keeps the largest value instead. Said once"
    )
