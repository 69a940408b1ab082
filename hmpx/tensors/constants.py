"""Constant tensors, such as tables, created once per device.

On devices other than the CPU, creating one is a synchronous copy from the host.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..torch_internals import dispatch_modes, is_graph_made, is_jit_tracing, transforms


class Constant:
    """A constant tensor, on each device that needs it."""

    def __init__(self, make: Callable[[torch.device], Tensor]) -> None:
        """Creates no tensor yet.

        Args:
            make: Returns a new tensor on the given device.
        """
        self._make = make
        self._made: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """Returns the tensor on ``device``; it must not be written to.

        While a graph is traced, the graph creates a new tensor. A new one is also created where modes
        and transforms may wrap new tensors.
        """
        if torch.compiler.is_dynamo_compiling() or is_graph_made() or is_jit_tracing():
            return self._make(device)
        found = self._made.get(device)
        if found is not None:
            return found
        if dispatch_modes() or transforms() is not None:
            return self._make(device)
        with torch.inference_mode(False):
            made = self._make(device)
        return self._made.setdefault(device, made)  # another thread may have been faster
