"""How a legalized call is computed: in fp32 from rounded inputs, then rounded.

The numerics are those of hardware that multiplies in low precision and accumulates in fp32. What gets
rounded: every input (it arrives here in the low-precision dtype), the output, the incoming gradient,
and each outgoing gradient. What autograd saves is held in the low-precision dtype. Independent of op
lists, of how wrappers are installed in torch, and of which calls are legalized.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

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
from ..graph_rounding import in_graph
from ..saved_tensors import Precision, keeping_low
from . import convolutions, linears
from .blocks import BLOCKED, in_blocks
from .capability import PRODUCTS
from .graphs import is_exported, is_traced
from .prepared import is_any_prepared


@dataclass(slots=True)
class LegalizedCall:
    """One call that is legalized.

    Attributes:
        function: torch's function.
        inputs: Facts about the floating-point inputs among the arguments.
        args: Positional arguments.
        kwargs: Keyword arguments.
        given: The positional arguments before they were cast.
        dtype: The low-precision dtype.
    """

    function: Callable[..., Any]
    inputs: Inputs
    args: Args
    kwargs: Kwargs
    given: Args
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Legalizer:
    """Computes one op in fp32.

    Attributes:
        op: Op name.
        kind: One of `capability.KINDS`.
        mode: One of `LEGALIZE_MODES` except ``"never"``.
    """

    op: str
    kind: str
    mode: str

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
        """Returns the result of a layer that rounds its parameters itself, in ``dtype``; else None.

        Args:
            function: torch's function.
            inputs: Facts about the floating-point inputs among the arguments.
            args: All arguments, as given or as cast.
            dtype: The low-precision dtype.
            is_cast: The arguments have been cast; a linear layer is then computed by `compute`.
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
        """Returns the result in ``call.dtype``, from the first of `STRATEGIES` that gives one."""
        for strategy in STRATEGIES:
            result = strategy(self, call)
            if result is not None:
                return result
        result = call_raised(call.function, call.args, call.kwargs, self.upcast)
        return rounded(result, CAST[call.dtype])


# --- the strategies --------------------------------------------------------------------------------

#: Returns a call's result; None to leave it to the next strategy.
Strategy = Callable[[Legalizer, LegalizedCall], Any]


def _as_arithmetic_in_graphs(legalizer: Legalizer, call: LegalizedCall) -> Any:
    """In graphs, rounding is arithmetic, since compilers may elide round-trip casts."""
    if is_traced() and legalizer.rounds_inputs and not is_exported():
        return in_graph(call.function, call.args, call.kwargs, call.dtype)
    return None


def _as_casts_for_transforms(legalizer: Legalizer, call: LegalizedCall) -> Any:
    """Transforms, jit tracing and tensor subclasses see only casts and the function."""
    if not call.inputs.is_plain or transforms() is not None or is_jit_tracing():
        return computed_in_fp32(call.function, call.args, call.kwargs, call.dtype)
    return None


def _as_linear_layer(legalizer: Legalizer, call: LegalizedCall) -> Any:
    """In fp32 memory that is kept from call to call, without hooks on saved tensors."""
    if legalizer.op != "linear" or not call.inputs.is_learning or call.kwargs:
        return None
    return linears.compute(call.args, call.given, call.dtype, rounds_inputs=legalizer.rounds_inputs)


def _keeping_low_precision_for_backward(legalizer: Legalizer, call: LegalizedCall) -> Any:
    """Autograd saves low-precision tensors, where hooks on saved tensors are allowed."""
    if not call.inputs.is_learning or hooks_refused() is not None:
        return None
    is_product, is_attention = legalizer.kind in PRODUCTS, legalizer.kind == "attention"
    precision = Precision(
        call.dtype, legalizer.upcast, is_product, legalizer.rounds_inputs, is_attention
    )
    return keeping_low(call.function, call.args, call.kwargs, call.given, precision)


def _with_prepared_weight(legalizer: Legalizer, call: LegalizedCall) -> Any:
    """Takes the fp32 values that are kept beside the weight of a convolution, in inference."""
    if legalizer.op not in convolutions.CONVOLUTIONS or call.inputs.is_learning or call.kwargs:
        return None
    if is_traced() or not is_any_prepared():
        return None
    if (
        is_training() or dispatch_modes()
    ):  # sums must match those with gradients; modes see every op
        return None
    return convolutions.with_prepared(legalizer.op, call.function, call.args, call.dtype)


def _in_blocks_of_the_weight(legalizer: Legalizer, call: LegalizedCall) -> Any:
    """Upcasts a weight block by block; not in training, where sums must match those with gradients."""
    if call.inputs.is_learning or legalizer.op not in BLOCKED or call.kwargs or is_training():
        return None
    if dispatch_modes():  # they may keep what they see of kept memory
        return None
    return in_blocks(legalizer.op, call.args, call.dtype)


def _as_convolution_without_gradients(legalizer: Legalizer, call: LegalizedCall) -> Any:
    """In fp32 memory that is kept from call to call."""
    if call.inputs.is_learning or legalizer.op not in convolutions.CONVOLUTIONS:
        return None
    return convolutions.without_gradients(call.function, call.args, call.kwargs, call.dtype)


#: Tried in this order.
STRATEGIES: Final[tuple[Strategy, ...]] = (
    _as_arithmetic_in_graphs,
    _as_casts_for_transforms,
    _as_linear_layer,
    _keeping_low_precision_for_backward,
    _with_prepared_weight,
    _in_blocks_of_the_weight,
    _as_convolution_without_gradients,
)
