"""Ops in number formats with a history: what they round is scaled by the amaxes of earlier training steps.

Tensors have keys by where they are: the outermost module and the path in it, the op, and the role in
its call. Which amaxes there were is for `amaxes`. Where nothing tells what a call belongs to, or no values
are there, tensors are scaled by themselves: under transforms of torch.func, in forward mode, in exported
programs, on fake tensors.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ..number_formats import (
    Format,
    Rounder,
    Rounding,
    Scaled,
    is_compiled,
    largest_magnitude,
)
from ..tensors import PLAIN_TENSORS
from ..torch_internals import (
    FakeTensor,
    FunctionalTensor,
    disable_modes,
    dispatch_modes,
    has_tangents,
    is_batch,
    is_graph_made,
    jit_tracing_state,
    run_when_traced,
    transforms,
)
from ..torch_state import is_training, spot, without_casts
from . import opaque_rounding
from .amaxes import end_step_in_force, has_history, in_force
from .emulated_products import ByAxis
from .emulation import Emulation, Formats

_NO_CONTEXT: Final = contextlib.nullcontext()

#: What dynamo and AOTAutograd trace tensors as.
_TRACED: Final = frozenset({*PLAIN_TENSORS, FunctionalTensor, FakeTensor})


def emulation_class(formats: Formats) -> type[Emulation]:
    """Returns the class that computes ops in these formats."""
    given = (formats.result, formats.weights, formats.activations, formats.gradients)
    return DelayedEmulation if any(map(has_history, given)) else Emulation


@run_when_traced
def key_of(op: str, role: str, format: str, is_taken: bool) -> str:
    """Returns the key of a tensor in a call that is made here.

    Args:
        op: Op name.
        role: What the tensor is in the call.
        format: Name of the format.
        is_taken: As of `Histories.label_of`, also where the module is in training mode.
    """
    root, path = spot()
    histories = in_force()
    label = (
        ""
        if root is None or histories is None
        else histories.label_of(root, is_taken=is_taken or root.training)
    )
    return f"{label}:{path}:{op}:{role}:{format}"


def round_delayed(rounding: Rounding, key: str, records: bool, x: Tensor) -> Tensor:
    """Returns ``x`` rounded, scaled by earlier steps if there are any.

    Args:
        rounding: Rounds to a format with a history.
        key: That of the tensor.
        records: Its amax counts for later steps.
        x: The tensor.
    """
    if torch.compiler.is_dynamo_compiling() or not _has_values(x):
        return (
            opaque_rounding.rounded(rounding, key, records, x) if _is_compiled(x) else rounding(x)
        )
    histories = in_force()
    if histories is None:
        return rounding(x)
    format = rounding.format
    assert isinstance(format, Scaled)
    amax = largest_magnitude(x) if _is_on_host(x) else None
    if amax is not None:
        scale = histories.scale_for(key, format, amax, records=records)
    else:
        with torch.no_grad(), without_casts(), disable_modes() if dispatch_modes() else _NO_CONTEXT:
            found = format.amax(x)
            found_here = found.item() if _is_on_host(x) else found
            scale = histories.scale_for(key, format, found_here, records=records)
    return rounding(x) if scale is None else rounding(x, None, scale)


def _is_on_host(x: Tensor) -> bool:
    """Whether to read a number of ``x`` takes no time."""
    return x.is_cpu


def _has_values(x: Tensor) -> bool:
    """Whether ``x`` holds values that are its own, and not a graph's or a transform's."""
    return (
        type(x) in PLAIN_TENSORS
        and not x.is_meta
        and transforms() is None
        and not has_tangents()
        and not is_batch(x)
        and jit_tracing_state() is None
        and not is_graph_made()
    )


def _is_compiled(x: Tensor) -> bool:
    """Whether torch.compile traces, and values will be there when the graph runs."""
    return type(x) in _TRACED and is_compiled()


opaque_rounding.called_by(round_delayed, end_step_in_force)


@dataclass(frozen=True)
class DelayedEmulation(Emulation):
    """Computes one op in number formats, some of which have a history."""

    def _delayed(self, role: str, round_: Rounder, format: Format) -> Rounder:
        """Returns what rounds a tensor of this call."""
        if not has_history(format):
            return round_
        rounding = self._rounder(format)
        assert isinstance(rounding, Rounding)
        records = is_training()
        # A graph has its keys for good.
        is_taken = records or torch.compiler.is_dynamo_compiling()
        key = key_of(self.op, role, format.name, is_taken)
        return functools.partial(round_delayed, rounding, key, records)

    def _rounded(self, role: str, tensor: Tensor, round_: Rounder, format: Format) -> Tensor:
        return super()._rounded(role, tensor, self._delayed(role, round_, format), format)

    def _delayed_gradient(self, role: str) -> Rounder | None:
        format = self.formats.gradients
        if format is None:
            return None
        return self._delayed(role, self._rounder(format), format)

    def _outgoing(self, role: str) -> Rounder | None:
        return None if self._result is None else self._delayed_gradient(f"gradient of {role}")

    def _incoming(self) -> Rounder | None:
        return self._delayed_gradient("gradient")

    def _incoming_by_axis(self) -> ByAxis | None:
        if not has_history(self.formats.gradients):
            return super()._incoming_by_axis()
        round_ = self._delayed_gradient("gradient")
        assert round_ is not None
        return lambda axis: round_

    def _result_rounder(self) -> Rounder | None:
        if self._result is None:
            return None
        return self._delayed("result", self._result, self.formats.result)
