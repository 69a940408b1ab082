"""Ops in number formats with delayed scaling: values are scaled by the amaxes of earlier training steps.

A tensor's key consists of the outermost module and the path in it, the op, and the role in its call. Without
a place or values, tensors use their own scale: under torch.func transforms, in forward mode, in exported
programs, on fake tensors. Graphs of torch.compile contain operators that read the histories when they run.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from .. import torch_internals
from ..number_formats import (
    Format,
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

#: Returns a tensor's scale by earlier steps, or None for its own.
Scaler: TypeAlias = Callable[[Tensor], Tensor | None]

_NO_CONTEXT: Final = contextlib.nullcontext()


def rounder_for(rounding: Rounder, op: str, role: str) -> Rounder:
    assert isinstance(rounding, FormatRounding)
    return functools.partial(round_delayed, rounding, *_history_of(op, role, rounding.format))


def scaler_for(format: Format, op: str, role: str) -> Scaler:
    """Returns the function that returns a tensor's `delayed_scale` for this role in the current call."""
    assert isinstance(format, Scaled)
    return functools.partial(delayed_scale, format, *_history_of(op, role, format))


def _history_of(op: str, role: str, format: Format) -> tuple[str, bool]:
    """Returns the key of a tensor's history, and whether the tensor is recorded in it."""
    records = is_training()
    # A graph's keys are fixed.
    is_taken = records or torch.compiler.is_dynamo_compiling()
    return key_of(op, role, format.name, is_taken), records


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
    if not has_values(x):
        if not takes_operators(x):
            return rounding(x)
        operator = _ROUNDED_BY_CHANCE if rounding.mode == "stochastic" else _ROUNDED
        text = text_of(format, rounding.mode, rounding.overflow)
        rounded: Tensor = operator(x.detach(), text, key, records)
        return rounded
    assert isinstance(format, Scaled)
    scale = delayed_scale(format, key, records, x)
    return rounding(x) if scale is None else rounding(x, None, scale)


def delayed_scale(format: Scaled, key: str, records: bool, x: Tensor) -> Tensor | None:
    """Returns the scale of a tensor by earlier steps, or None for its own; ``x`` must have values."""
    histories = in_force()
    if histories is None:
        return None
    amax: float | Tensor | None = largest_magnitude(x) if _is_on_host(x) else None
    if amax is not None:
        return histories.scale_for(key, format, amax, records=records)
    with (
        torch.no_grad(),
        without_casts(),
        torch_internals.disable_modes() if torch_internals.dispatch_modes() else _NO_CONTEXT,
    ):
        found = format.amax(x)
        amax = found.item() if _is_on_host(x) else found
        return histories.scale_for(key, format, amax, records=records)


def _is_on_host(x: Tensor) -> bool:
    """Whether reading a number of ``x`` is fast."""
    return x.is_cpu


def has_values(x: Tensor) -> bool:
    """Whether ``x`` has its own values, rather than a graph's or a transform's."""
    return (
        not torch.compiler.is_dynamo_compiling()
        and type(x) in PLAIN_TENSORS
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
