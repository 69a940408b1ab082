"""Where a model holds a tensor: in which module, and under which name."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Slot:
    """A place for a parameter or buffer, and the tensor that was found there.

    Attributes:
        path: The module's path in the model; ``""`` for the model itself.
        module: The module.
        attribute: The tensor's name in the module.
        is_buffer: Whether the slot is for a buffer.
        tensor: The tensor that was found there.
    """

    path: str
    module: nn.Module
    attribute: str
    is_buffer: bool
    tensor: Tensor

    @property
    def name(self) -> str:
        """The slot's name in the model."""
        return f"{self.path}.{self.attribute}" if self.path else self.attribute

    @property
    def container(self) -> MutableMapping[str, Any]:
        """The module's parameters or buffers by name: a dict, except for modules of TorchScript."""
        module = self.module
        return module._buffers if self.is_buffer else module._parameters

    def current(self) -> Tensor | None:
        """Returns the tensor that is there now, if any."""
        container = self.container
        if self.attribute not in container:  # TorchScript's containers have no get
            return None
        found: Tensor | None = container[self.attribute]
        return found


def slots_of(model: nn.Module, tensors: Iterable[Tensor]) -> tuple[Slot, ...]:
    """Returns every slot of ``model`` that holds one of ``tensors``."""
    wanted = set(map(id, tensors))
    return tuple(
        Slot(path, module, attribute, is_buffer, tensor)
        for path, module in model.named_modules()
        for is_buffer, container in ((False, module._parameters), (True, module._buffers))
        for attribute, tensor in container.items()
        if id(tensor) in wanted
    )
