"""Floating-point operations of a call, by the formulas of `torch.utils.flop_counter`.

A call is made again on tensors without memory, under torch's counter; its result depends on shapes
alone. So legalized and emulated calls count as what the program asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..tensors import floating_in
from ..torch_internals import disable_modes
from ..torch_state import without_casts
from .signatures import Shape, Signature, rebuilt


class Flops(NamedTuple):
    """Floating-point operations of one call.

    Attributes:
        forward: Of the call itself.
        backward: Of its gradients.
    """

    forward: int
    backward: int


NONE = Flops(0, 0)


@functools.lru_cache(maxsize=10_000)
def flops(function: Callable[..., Any], found: Signature) -> Flops:
    """Returns the operations of a call of torch's ``function``; none where it depends on values."""
    from torch.utils.flop_counter import FlopCounterMode  # which takes long to import

    made: list[Tensor] = []

    def make(shape: Shape) -> Tensor:
        is_real = shape.dtype.is_floating_point
        dtype = torch.float32 if is_real and shape.dtype.itemsize < 4 else shape.dtype
        tensor = torch.empty(shape.sizes, dtype=dtype, device="meta", requires_grad=shape.learns)
        made.append(tensor)
        # In-place ops write to no leaf that learns.
        return tensor.view_as(tensor) if shape.learns else tensor

    with disable_modes(), without_casts(), torch.enable_grad():
        args, kwargs = rebuilt(found, make)
        for name in ("device", "out", "generator"):
            kwargs.pop(name, None)
        try:
            with FlopCounterMode(display=False) as counter:
                result = function(*args, **kwargs)
            forward = counter.get_total_flops()
            if not forward:
                return NONE
            learning = [tensor for tensor in made if tensor.requires_grad]
            results = [each for each in floating_in([result]) if each.requires_grad]
            if not learning or not results:
                return Flops(forward, 0)
            gradients = [torch.empty_like(each) for each in results]
            with FlopCounterMode(display=False) as counter:
                torch.autograd.grad(results, learning, gradients, allow_unused=True)
            return Flops(forward, counter.get_total_flops())
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            return NONE  # its shapes depend on values, or it has no kernel without memory
