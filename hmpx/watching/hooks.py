"""Hooks on the autograd nodes of a watched call: they note the gradients that pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..torch_internals import (
    dispatch_modes,
    has_tangents,
    is_graph_made,
    is_jit_tracing,
    transforms,
)
from .records import CallRecord, Cell, GradientRecord
from .trials import Arguments

if TYPE_CHECKING:
    from .noting import Notes


class Hooks:
    """The hooks on the autograd nodes of one call: they live as long as these.

    They keep the arguments of the call, if its backward may be tried, until that has run.
    """

    __slots__ = ("_arguments", "_arrived", "_gradients", "_left", "_name", "_notes", "_record")

    def __init__(
        self,
        notes: Notes,
        record: CallRecord,
        name: str,
        arguments: Arguments | None,
        exits: int,
    ) -> None:
        self._notes, self._record, self._name = notes, record, name
        self._arguments, self._left = arguments, exits
        self._arrived: list[Cell] = []
        self._gradients: dict[int, Tensor] = {}

    def arrive(self, numbers: Mapping[int, int], grad_outputs: Sequence[Tensor | None]) -> None:
        """Notes the gradients of the results.

        Args:
            numbers: Number of a gradient -> number of the result.
            grad_outputs: The gradients.
        """
        if self._is_closed():
            return
        self._take(numbers, grad_outputs)
        self._add([])

    def pass_on(
        self,
        edges: Sequence[int],
        numbers: Mapping[int, int] | None,
        grad_inputs: Sequence[Tensor | None],
        grad_outputs: Sequence[Tensor | None],
    ) -> None:
        """Notes the gradients of the inputs, and those of the results if no other node gets them first."""
        if self._is_closed():
            return
        if numbers is not None:
            self._take(numbers, grad_outputs)
        self._add(self._notes.gradients([grad_inputs[e] for e in edges if e < len(grad_inputs)]))
        self._left -= 1
        if not self._left:
            self._release()

    def _is_closed(self) -> bool:
        if self._notes.is_open and not is_off_limits():
            return False
        self._release()
        return True

    def _release(self) -> None:
        self._arguments, self._gradients = None, {}

    def _take(self, numbers: Mapping[int, int], gradients: Sequence[Tensor | None]) -> None:
        self._arrived = self._notes.gradients(gradients)
        if self._arguments is not None:
            for position, number in numbers.items():
                if (gradient := gradients[position]) is not None:
                    self._gradients[number] = gradient

    def _add(self, after: list[Cell]) -> None:
        notes, before = self._notes, self._arrived
        if before or after:
            record = GradientRecord(self._record, self._name, before, after, notes.step)
            if self._arguments is not None:
                notes.try_backward(record, self._arguments, self._gradients)
            notes.add(record)


def is_off_limits() -> bool:
    """Whether calls made here have no values, or belong to a transform or a trace."""
    if transforms() is not None or is_jit_tracing() or has_tangents():
        return True
    return bool(dispatch_modes()) and is_graph_made()


def is_captured(tensor: Tensor) -> bool:
    """Whether calls with ``tensor`` are being recorded for a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
