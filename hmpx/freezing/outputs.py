"""The outputs of a frozen model, in float32."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..tensors import widened


class WidensOutputs:
    """A forward hook that returns float32 where the model returns bfloat16 or float16."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Returns the module's output, upcast."""
        return widened(output)
