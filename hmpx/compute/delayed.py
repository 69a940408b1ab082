"""Ops in number formats with delayed scaling: values are scaled by the amaxes of earlier training steps.

A tensor's key consists of the outermost module and the path in it, the op, and the role in its call. Without
a place or values, tensors use their own scale: under torch.func transforms, in forward mode, in exported
programs, on fake tensors. Graphs of torch.compile contain operators that read the histories when they run.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Final

import torch
from torch import Tensor

from .. import torch_internals
from ..number_formats import (
    FormatRounding,
    Rounder,
    Scaled,
    largest_magnitude,
    rounding_in,
    takes_operators,
    text_of,
)
from ..tensors import PLAIN_TENSORS
from ..torch_state import is_training, spot, without_casts
from .amaxes import end_step_in_force, in_force

_NO_CONTEXT: Final = contextlib.nullcontext()


def rounder_for(rounding: Rounder, op: str, role: str) -> Rounder:
    assert isinstance(rounding, FormatRounding)
    records = is_training()
    # A graph's keys are fixed.
    is_taken = records or torch.compiler.is_dynamo_compiling()
    key = key_of(op, role, rounding.format.name, is_taken)
    return functools.partial(round_delayed, rounding, key, records)


@torch_internals.run_when_traced
def key_of(op: str, role: str, format: str, is_taken: bool) -> str:
    """Returns the key of a tensor with this role in the current call.

    With ``is_taken``, or in training mode, the outermost module reserves its label.
    """
    root, path = spot()
    histories, label = in_force(), ""
    if root is not None and histories is not None:
        label = histories.label_of(root, is_taken=is_taken or root.training)
    return f"{label}:{path}:{op}:{role}:{format}"


def round_delayed(rounding: FormatRounding, key: str, records: bool, x: Tensor) -> Tensor:
    """Returns ``x`` rounded to a format with a history, scaled by earlier steps, if any.

    With ``records`` its amax affects later steps.
    """
    format = rounding.format
    if torch.compiler.is_dynamo_compiling() or not _has_values(x):
        if not takes_operators(x):
            return rounding(x)
        operator = _ROUNDED_BY_CHANCE if rounding.mode == "stochastic" else _ROUNDED
        text = text_of(format, rounding.mode, rounding.overflow)
        rounded: Tensor = operator(x.detach(), text, key, records)
        return rounded
    histories = in_force()
    if histories is None:
        return rounding(x)
    assert isinstance(format, Scaled)
    amax: float | Tensor | None = largest_magnitude(x) if _is_on_host(x) else None
    if amax is None:
        with (
            torch.no_grad(),
            without_casts(),
            torch_internals.disable_modes() if torch_internals.dispatch_modes() else _NO_CONTEXT,
        ):
            found = format.amax(x)
            amax = found.item() if _is_on_host(x) else found
            scale = histories.scale_for(key, format, amax, records=records)
    else:
        scale = histories.scale_for(key, format, amax, records=records)
    return rounding(x) if scale is None else rounding(x, None, scale)


def _is_on_host(x: Tensor) -> bool:
    """Whether reading a number of ``x`` is fast."""
    return x.is_cpu


def _has_values(x: Tensor) -> bool:
    """Whether ``x`` has its own values, rather than a graph's or a transform's."""
    return (
        type(x) in PLAIN_TENSORS
        and not x.is_meta
        and torch_internals.transforms() is None
        and not torch_internals.has_tangents()
        and not torch_internals.is_batch(x)
        and torch_internals.jit_tracing_state() is None
        and not torch_internals.is_graph_made()
    )


# --- operators of graphs ----------------------------------------------------------------------------
# They are idempotent within a step: they record and return the same for a tensor. So compilers may omit,
# move and repeat them like pure functions.


def _run(x: Tensor, rounding: str, key: str, records: bool) -> Tensor:
    with without_casts():
        found = round_delayed(rounding_in(rounding), key, records, x)
    return found.clone() if found is x else found


def _shaped(x: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(x)


def _defined(signature: str, function: Any, fake: Any, *tags: str) -> Any:
    operator = torch_internals.own_operator(signature, fake, "cudagraph_unsafe", *tags)
    torch_internals.set_kernel(operator, function, "CompositeExplicitAutograd")
    return operator


_SIGNATURE: Final = "(Tensor x, str rounding, str key, bool records) -> Tensor"
_ROUNDED: Final = _defined(f"rounded_delayed{_SIGNATURE}", _run, _shaped)
_ROUNDED_BY_CHANCE: Final = _defined(
    f"rounded_delayed_by_chance{_SIGNATURE}", _run, _shaped, "nondeterministic_seeded"
)
#: Declared as writing to an updated parameter, so that compilers run it, after the update.
_STEP_ENDED: Final = _defined(
    "step_ended(Tensor(a!) x) -> ()", lambda x: end_step_in_force(), lambda x: None
)


def step_ended(parameter: Tensor) -> None:
    """Ends a training step in a graph that is being traced."""
    _STEP_ENDED(parameter.detach())
