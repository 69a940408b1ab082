"""Where the inputs and gradients of a product with a weight are rounded.

Independent of which products are computed with these, and why.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...tensors import CAST
from .scratch import New, Temporaries


@dataclass(frozen=True, slots=True)
class Rounding:
    """How a product with a weight is rounded.

    Attributes:
        dtype: The low-precision dtype.
        rounds_inputs: fp32 inputs are rounded first.
    """

    dtype: torch.dtype
    rounds_inputs: bool

    def raised(self, tensor: Tensor, memory: Temporaries | New) -> Tensor:
        """Returns the fp32 tensor to compute with."""
        if tensor.dtype is not torch.float32:
            return memory.widen(tensor)
        return memory.rounded(tensor, self.dtype) if self.rounds_inputs else tensor

    def gradient(self, gradient: Tensor, dtype: torch.dtype, memory: Temporaries | New) -> Tensor:
        """Returns the outgoing gradient of an input of ``dtype``; may write to the fp32 one."""
        if dtype is not torch.float32:
            return CAST[dtype](gradient)
        return memory.round_(gradient, self.dtype) if self.rounds_inputs else gradient
