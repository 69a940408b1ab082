"""The place of a plan: fake tensors of a device that may be absent, or real ones."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PlanError, said_by
from ..patching import apply, undo
from ..tensors import is_present, map_all
from ..torch_internals import (
    HERE,
    FakeTensor,
    fake_mode,
    planning,
    quiet,
    replacing_parameters,
    standing_in,
)
from .kernels import Corrections, stand_ins


class Place:
    """The place of a plan's tensors."""

    def __init__(self, device_type: str, *, is_small: bool) -> None:
        self.device_type = device_type
        self.is_small = is_small  # Tensors are real, on the CPU
        # torch has that device here; otherwise fake tensors replace it
        self.is_there = device_type == "cpu" or (is_present(device_type) and not is_small)
        self._corrections = Corrections()
        self._mode = None if is_small else fake_mode()

    @property
    def decided_by(self) -> str:
        """The device type for decisions."""
        return "cpu" if self.is_small else self.device_type

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Puts tensors made in the block in this place."""
        if self.is_small:
            yield
            return
        with contextlib.ExitStack() as stack:
            if not self.is_there:
                stack.enter_context(standing_in(self.device_type))
                stack.callback(undo, apply(stand_ins(self.device_type)))
            stack.enter_context(quiet())
            stack.enter_context(replacing_parameters())
            stack.enter_context(planning())
            stack.enter_context(self._mode)  # type: ignore[arg-type]
            stack.enter_context(self._corrections)
            yield

    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        """Puts new tensors on the device, without values."""
        with torch.device("cpu" if self.is_small else self.device_type), self.without_values():
            yield

    @contextlib.contextmanager
    def without_values(self) -> Iterator[None]:
        """Makes up values that are requested."""
        self._corrections.answers = True
        try:
            yield
        finally:
            self._corrections.answers = False

    # --- moving tensors ----------------------------------------------------------------------------

    def inputs(self, value: Any) -> Any:
        """Returns inputs with all their tensors in this place."""
        return map_all(value, self._placed)

    def model(self, model: nn.Module) -> nn.Module:
        """Returns a model with all parameters and buffers in this place: itself if they are, else a copy."""
        if self.is_small:
            return model
        memo: dict[int, Any] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            placed = self._placed(tensor)
            if placed is not tensor:
                memo[id(tensor)] = _like(placed, tensor)
        if not memo:
            return model
        try:
            return copy.deepcopy(model, memo)
        except Exception as error:  # of the model's own attributes
            raise PlanError(
                f"{type(model).__name__} has weights of its own, and can't be copied without them: "
                f"{said_by(error)}; give a function that builds it: hmpx.plan(lambda: Model(), ...)"
            ) from error

    def _placed(self, tensor: Tensor) -> Tensor:
        if self.is_small:
            return tensor
        is_placed = isinstance(tensor, FakeTensor) and tensor.device.type == self.device_type
        if is_placed or tensor.layout is not torch.strided or tensor.is_nested:
            return tensor
        device = torch.device(self.device_type, 0) if self.is_there else HERE
        if self.device_type == "cpu":
            device = torch.device("cpu")
        with torch.no_grad():
            found = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
            )
        if not isinstance(tensor, FakeTensor):
            self._corrections.values.keep(found, tensor)
        elif (values := self._corrections.values.of(tensor)) is not None:
            self._corrections.values.keep(found, values)
        return found.requires_grad_(tensor.requires_grad)


def _like(placed: Tensor, tensor: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(placed.detach(), requires_grad=tensor.requires_grad)
    return placed
