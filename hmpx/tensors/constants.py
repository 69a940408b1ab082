"""Tensors whose values are always the same, such as a table: made once for each device.

On devices other than the CPU, making one is a copy from the host, which the host waits for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..torch_internals import dispatch_modes, is_graph_made, is_jit_tracing, transforms


class Constant:
    """A tensor of constants, on each device that asks for it."""

    def __init__(self, make: Callable[[torch.device], Tensor]) -> None:
        """Makes nothing yet.

        Args:
            make: Returns a new tensor on the given device.
        """
        self._make = make
        self._made: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """Returns the tensor on ``device``; it must not be written to.

        While a graph is being traced, the tensor is made anew as part of the graph. It is also made
        anew where modes and transforms may wrap what they see being made.
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
