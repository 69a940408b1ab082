"""The amaxes of one kind of tensor, step by step, and what tensors are scaled by in the step after.

On the CPU they are numbers. On other devices they stay there, since to read one would wait for the device.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from ..patching import unpatched

if TYPE_CHECKING:
    from ..number_formats import Scaled

# As they are where nothing is patched: op lists may name any of them.
_fmax, _where, _gt, _max = unpatched(torch.fmax, torch.where, torch.gt, torch.max)
_eq, _and, _mul, _clamp = unpatched(torch.eq, torch.logical_and, torch.mul, torch.clamp)
_roll, _zeros, _tensor = unpatched(torch.roll, torch.zeros, torch.tensor)

#: The largest amax.
MOST: Final = torch.finfo(torch.float32).max


class HostHistory:
    """Amaxes as numbers.

    Attributes:
        format: The format whose scales they make.
        steps: How many steps have ended in which there was one.
        pending: The largest of the step that is running; 0 for none.
        is_pending: Whether that step has seen any.
        amaxes: Those of earlier steps, the latest first; 0 where there was none.
        reference: The amax that tensors are scaled by; 0 while there is none but zero.
        scale: That scale; None while there is none.
    """

    __slots__ = ("amaxes", "format", "is_pending", "pending", "reference", "scale", "steps")

    def __init__(self, format: Scaled) -> None:
        """Starts without any."""
        assert format.history is not None
        self.format, self.steps = format, 0
        self.pending, self.is_pending = 0.0, False
        self.amaxes = deque([0.0] * format.history, format.history)
        self.reference = 0.0
        self.scale: Tensor | None = None

    @staticmethod
    def is_for(amax: float | Tensor) -> bool:
        """Whether it takes amaxes of this kind."""
        return not isinstance(amax, Tensor)

    def fold(self, amax: float) -> None:
        """Takes the amax of one more tensor; NaN, that of a tensor with infinity or NaN, is left out."""
        self.pending = max(self.pending, amax)  # which NaN is not
        self.is_pending = True

    def roll(self) -> None:
        """Ends a step."""
        self.amaxes.appendleft(self.pending)
        amax = self.pending if self.format.amax_rule == "most_recent" else max(self.amaxes)
        if amax > 0:
            self._scale_by(min(amax * 2.0**self.format.margin, MOST))
        self.pending, self.is_pending = 0.0, False
        self.steps += 1

    def _scale_by(self, reference: float) -> None:
        self.reference = reference
        with torch.inference_mode(False):
            self.scale = self.format.scale(_tensor(reference, device="cpu"))

    def scale_for(self, amax: float) -> Tensor | None:
        """Returns what a tensor with this amax is divided by; None for its own scale.

        That is so while there is no earlier one, and where it is NaN, so that all of the tensor becomes NaN.
        """
        return None if math.isnan(amax) else self.scale

    def saved(self) -> dict[str, Any]:
        """Returns all that a history holds, as numbers."""
        return {
            "steps": self.steps,
            "pending": self.pending if self.is_pending else None,
            "reference": self.reference,
            "amaxes": list(self.amaxes),
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Takes what `saved` has returned, of a history that may be longer or shorter."""
        count = len(self.amaxes)
        self.amaxes.clear()
        self.amaxes.extend((*saved["amaxes"], *[0.0] * count)[:count])
        self.steps, self.is_pending = saved["steps"], saved["pending"] is not None
        self.pending = saved["pending"] or 0.0
        if saved["reference"]:
            self._scale_by(saved["reference"])


class DeviceHistory:
    """Amaxes in tensors on a device, which are written in place, so that CUDA graphs find them.

    Attributes:
        format: The format whose scales they make.
        steps: How many steps have ended in which there was one.
        is_pending: Whether the step that is running has seen any.
        pending: The largest of that step: 0-dim float32.
        amaxes: Those of earlier steps, the latest first: float32.
        reference: The amax that tensors are scaled by: 0-dim float32.
    """

    __slots__ = ("amaxes", "format", "is_pending", "pending", "reference", "steps")

    def __init__(self, format: Scaled, device: torch.device) -> None:
        """Starts without any."""
        assert format.history is not None
        self.format, self.steps, self.is_pending = format, 0, False
        with torch.inference_mode(False):
            memory = _zeros(format.history + 2, dtype=torch.float32, device=device)
            self.pending, self.reference, self.amaxes = memory[0], memory[1], memory[2:]

    @staticmethod
    def is_for(amax: float | Tensor) -> bool:
        """Whether it takes amaxes of this kind."""
        return isinstance(amax, Tensor)

    def fold(self, amax: Tensor) -> None:
        """Takes the amax of one more tensor; NaN is left out."""
        if amax.device != self.pending.device:
            amax = amax.to(self.pending.device)
        _fmax(self.pending, amax, out=self.pending)
        self.is_pending = True

    def roll(self) -> None:
        """Ends a step."""
        format, amaxes, pending = self.format, self.amaxes, self.pending
        if amaxes.numel() > 1:
            amaxes.copy_(_roll(amaxes, 1))
        amaxes[0].copy_(pending)
        amax = pending if format.amax_rule == "most_recent" else _max(amaxes)
        if format.margin:
            amax = _clamp(_mul(amax, 2.0**format.margin), max=MOST)
        self.reference.copy_(_where(_gt(amax, 0), amax, self.reference))
        pending.zero_()
        self.is_pending = False
        self.steps += 1

    def scale_for(self, amax: Tensor) -> Tensor | None:
        """Returns what a tensor with this amax is divided by; None for its own scale."""
        if not self.steps:
            return None
        reference = self.reference
        if reference.device != amax.device:
            reference = reference.to(amax.device)
        is_known = _and(_gt(reference, 0), _eq(amax, amax))
        return self.format.scale(_where(is_known, reference, amax))

    def saved(self) -> dict[str, Any]:
        """Returns all that a history holds, as numbers."""
        return {
            "steps": self.steps,
            "pending": self.pending.item() if self.is_pending else None,
            "reference": self.reference.item(),
            "amaxes": self.amaxes.tolist(),
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Takes what `saved` has returned, of a history that may be longer or shorter."""
        amaxes = saved["amaxes"][: self.amaxes.numel()]
        self.amaxes[: len(amaxes)].copy_(_tensor(amaxes, dtype=torch.float32, device="cpu"))
        self.reference.fill_(saved["reference"])
        self.steps, self.is_pending = saved["steps"], saved["pending"] is not None
        self.pending.fill_(saved["pending"] or 0.0)
