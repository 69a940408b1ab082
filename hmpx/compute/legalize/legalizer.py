"""Computes a legalized call: in fp32 from rounded inputs, then rounded.

The numerics are those of hardware that multiplies in low precision and accumulates in fp32. Rounded are every
input (already in the low-precision dtype here), the output, the incoming gradient, and each outgoing gradient.
Autograd saves tensors in the low-precision dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...tensors import CAST, Args, Kwargs
from ...torch_internals import dispatch_modes, hooks_refused, is_jit_tracing, transforms
from ...torch_state import is_training
from ..composition import (
    Inputs,
    call_raised,
    computed_in_fp32,
    rounded,
    widen,
    widen_matrices,
)
from ..graphs import in_graph, is_exported, is_traced
from ..saved_tensors import Precision, keeping_low
from . import convolutions, linears
from .capability import PRODUCTS


@dataclass(slots=True)
class LegalizedCall:
    """One legalized call of torch's function."""

    function: Callable[..., Any]
    inputs: Inputs
    args: Args
    kwargs: Kwargs
    given: Args  # the positional arguments before they were cast
    dtype: torch.dtype  # the low-precision one


@dataclass(frozen=True, slots=True)
class Legalizer:
    """Computes one op in fp32."""

    op: str
    kind: str  # one of `capability.KINDS`
    mode: str  # one of `LEGALIZE_MODES` except "never"

    @property
    def rounds_inputs(self) -> bool:
        """Whether fp32 inputs are rounded first."""
        return self.mode != "fast"

    @property
    def upcast(self) -> Callable[[Tensor], Tensor]:
        """The function that casts one input to fp32."""
        return widen_matrices if self.kind == "gemm" else widen

    def compute_layer(
        self,
        function: Callable[..., Any],
        inputs: Inputs,
        args: Args,
        dtype: torch.dtype,
        *,
        is_cast: bool,
    ) -> Tensor | None:
        """Returns the result, in ``dtype``, of a layer that rounds its parameters itself; else None.

        Its arguments are uncast, or cast with ``is_cast``; a linear layer is then left to `compute`.
        """
        is_linear = self.op == "linear" and self.rounds_inputs and not is_cast
        is_layer = is_linear or self.op in convolutions.CONVOLUTIONS
        if not (is_layer and inputs.is_plain):
            return None
        if is_traced() or transforms() is not None or is_jit_tracing():
            return None
        if not inputs.is_learning:
            if is_cast or not self.rounds_inputs or is_training():
                return None
            if is_linear:
                return linears.without_gradients(args, dtype)
            return convolutions.without_gradients(function, args, {}, dtype)
        if is_linear:
            return linears.compute(args, args, dtype, rounds_inputs=True)
        return convolutions.compute(
            self.op, function, args, dtype, rounds_inputs=self.rounds_inputs
        )

    def compute(self, call: LegalizedCall) -> Any:
        """Returns the result in ``call.dtype``."""
        function, args, kwargs, dtype = call.function, call.args, call.kwargs, call.dtype
        # In graphs, rounding uses arithmetic, since compilers may elide round-trip casts.
        if is_traced() and self.rounds_inputs and not is_exported():
            return in_graph(function, args, kwargs, dtype)
        # Transforms, jit tracing and tensor subclasses see only casts and the function.
        if not call.inputs.is_plain or transforms() is not None or is_jit_tracing():
            return computed_in_fp32(function, args, kwargs, dtype)
        result = self._learning(call) if call.inputs.is_learning else self._inferring(call)
        if result is not None:
            return result
        return rounded(call_raised(function, args, kwargs, self.upcast), CAST[dtype])

    def _learning(self, call: LegalizedCall) -> Any:
        """Returns the result of a call for which autograd saves low-precision tensors; else None."""
        if self.op == "linear" and not call.kwargs:
            result = linears.compute(
                call.args, call.given, call.dtype, rounds_inputs=self.rounds_inputs
            )
            if result is not None:
                return result
        if hooks_refused() is not None:
            return None
        is_product, is_attention = self.kind in PRODUCTS, self.kind == "attention"
        precision = Precision(call.dtype, self.upcast, is_product, self.rounds_inputs, is_attention)
        return keeping_low(call.function, call.args, call.kwargs, call.given, precision)

    def _inferring(self, call: LegalizedCall) -> Any:
        """Returns the result of a product with a weight, in reused memory; else None."""
        is_convolution = self.op in convolutions.CONVOLUTIONS
        # In training, sums must match those with gradients; modes may keep tensors in reused memory.
        if not (call.kwargs or is_training() or dispatch_modes()):
            result = None
            if is_convolution and convolutions.is_any_prepared() and not is_traced():
                result = convolutions.with_prepared(self.op, call.function, call.args, call.dtype)
            elif self.op in linears.BLOCKED:
                result = linears.in_blocks(self.op, call.args, call.dtype)
            if result is not None:
                return result
        if not is_convolution:
            return None
        return convolutions.without_gradients(call.function, call.args, call.kwargs, call.dtype)
