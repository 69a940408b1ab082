"""Legalized calls of one site: which ones are computed in fp32 from rounded inputs, then rounded; and how.

The numerics are those of hardware that multiplies in low precision and accumulates in fp32. Rounded are every
input, the output, the incoming gradient, and each outgoing gradient. Autograd saves tensors in the low-precision
dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..casting import (
    ALONE,
    CallPlan,
    cast_args,
    floating_inputs,
    target_dtype,
    usual_caster,
    written,
)
from ..compute import (
    COMPUTED,
    CONVOLUTIONS,
    FOR_FILES,
    PRODUCTS,
    SMALL_PRODUCT,
    UNMEASURED,
    Inputs,
    Precision,
    call_raised,
    computed_in_fp32,
    convolutions,
    in_graph,
    inputs_of,
    is_reported_of_all,
    is_watched,
    keeping_low,
    known_capability,
    linears,
    names_dtype,
    note_unrounded,
    rounded,
    traced,
    widen,
    widen_matrices,
)
from ..errors import raised_here
from ..tensors import CAST, ELIGIBLE, LOW_DTYPES, Args, Kwargs
from ..torch_internals import dispatch_modes, hooks_refused, is_jit_tracing, transforms
from ..torch_state import is_below_dispatcher, is_training
from .retiring import Control

#: Runs torch's function, its first argument, on cast arguments; the original ones come last.
Runner = Callable[[Callable[..., Any], Args, Kwargs, Args, Kwargs], Any]

_CPU: Final = torch.device("cpu")

# Read before anything is patched.
_numel = Tensor.numel
is_dynamo_compiling = torch.compiler.is_dynamo_compiling


class Legalization:
    """Runs the calls of one site that may be legalized."""

    def __init__(self, plan: CallPlan, native: Runner, control: Control) -> None:
        """Starts with no device type settled; calls that are not legalized go to ``native``."""
        self._plan, self._native, self._control = plan, native, control
        self._op, self._kind, self._first = plan.site.op, plan.facts.kind, plan.facts.first_matrix
        mode = plan.options.legalize
        self._is_always, self._rounds_inputs = mode == "always", mode != "fast"
        # None if a call's inputs decide.
        self._dtype: Any = plan.decision.dtype if plan.is_low else None
        self._is_linear = self._op == "linear" and not plan.site.is_python
        self._is_convolution = self._op in CONVOLUTIONS and not plan.site.is_python
        self._reads_once = mode == "auto" and self._op == "linear"
        self._leaves_inference = not self._is_always and plan.device_types == {"cpu"}
        self._is_on_several, self._rounds_late = len(plan.device_types) > 1, plan.rounds_late
        self._cast_usual = usual_caster(plan) if plan.rounds_late else None
        self._upcast = widen_matrices if self._kind == "gemm" else widen
        self._settled: set[str] = set()  # device types of which no call is ever legalized
        control.may_apply = self.may_apply

    def run(
        self, function: Callable[..., Any], args: Args, kwargs: Kwargs, given: Args, named: Kwargs
    ) -> Any:
        """Runs a call; with ``rounds_late`` of its plan its inputs are uncast."""
        plan, is_cast = self._plan, True
        is_open = self._control.legalizes and not (self._is_on_several and self._is_settled(args))
        if is_open and self._first is not None and len(args) > self._first + 1:
            is_open = self.may_apply(args[self._first], args[self._first + 1])
        if self._rounds_late:
            is_cast = not (is_open and self._takes_uncast(args))
            cast = self._cast_usual(args, kwargs) if is_cast and self._cast_usual else None
            if cast is ALONE:
                return function(*args, **kwargs)
            if cast is not None:
                args = cast
            elif is_cast:
                args, kwargs = cast_args(plan, args, kwargs)
        found = self._legalized_inputs(args, kwargs, is_cast=is_cast) if is_open else None
        if found is not None:
            inputs, dtype = found
            return self._compute(function, inputs, args, kwargs, given, dtype, is_cast=is_cast)
        if not is_cast:
            args, kwargs = cast_args(plan, args, kwargs)
        return self._native(function, args, kwargs, given, named)

    # --- which calls ---------------------------------------------------------------------------

    def _is_settled(self, args: Args) -> bool:
        """Whether the first input is on a device where no call is legalized."""
        if is_dynamo_compiling() or not args:  # avoids guards on `_settled`
            return False
        # After a tensor of another dtype, the next input decides.
        is_known = getattr(args[0], "dtype", None) in ELIGIBLE
        return is_known and args[0].device.type in self._settled

    def may_apply(self, a: Any, b: Any) -> bool:
        """Whether the product of two matrices may be legalized, judged by their sizes alone."""
        if self._is_always or is_dynamo_compiling():  # avoids guards on sizes
            return True
        try:
            size, columns = a.numel(), a.shape[-1]
            if type(size) is not int:
                return True  # torch.jit.trace has tensors as sizes, graphs have symbols
            if size * b.numel() <= SMALL_PRODUCT * columns:
                return not self._rounds_inputs and is_watched()
        except raised_here(AttributeError, IndexError, RuntimeError):
            return True  # not matrices; nested tensors have no sizes
        if size > linears.FEW_ROWS * columns or not self._is_left("gemv", b) or traced():
            return True
        return not self._is_natively_fast(b)

    def _is_left(self, kind: str, first: Any) -> bool:
        """Whether a call with this first input is left to torch's kernels because it is not training."""
        if not self._leaves_inference or is_training():
            return False
        dtype = self._dtype or getattr(first, "dtype", None)
        if dtype not in LOW_DTYPES or (not self._rounds_inputs and is_watched()):
            return False
        return not known_capability(kind, _CPU, dtype).slow_in_inference

    def _is_natively_fast(self, b: Any) -> bool:
        """Whether native kernels multiply few rows by a second matrix as fast as they can.

        Its summed elements must be adjacent. A linear layer's parameter may also be rounded while it is read once.
        """
        if self._reads_once and self._dtype and linears.is_read_once(b, self._dtype):
            return False
        if b.dim() < 2 or b.is_nested or b.layout is not torch.strided:
            return True
        return bool(b.stride(-1 if self._op == "linear" else -2) == 1)

    def _takes_uncast(self, args: Args) -> bool:
        """Whether a call takes uncast inputs, which saves a layer the cast of its weight."""
        if not self._rounds_inputs:
            return True
        if len(args) < 2 or is_dynamo_compiling() or is_jit_tracing():
            return False
        x, weight = args[:2]
        if self._op != "linear" and torch.is_grad_enabled():
            return convolutions.is_large(x, weight)
        if type(weight) is not nn.Parameter or weight.dtype is not torch.float32:
            return False
        if torch.is_grad_enabled():
            return _is_large(x, weight)
        return linears.is_large_weight(weight)

    def _legalized_inputs(
        self, args: Args, kwargs: Kwargs, *, is_cast: bool
    ) -> tuple[Inputs, torch.dtype] | None:
        """Returns the inputs and the low-precision dtype of a call that is legalized; None for any other call."""
        plan = self._plan
        if self._first is None and self._is_left(self._kind, args[0] if args else None):
            return None
        if is_below_dispatcher():
            return None
        if (plan.may_write or kwargs) and written(plan, args, kwargs) is not None:
            return None
        inputs = inputs_of(args, kwargs)
        if inputs is None or inputs.first.device.type not in plan.device_types:
            return None
        if not is_dynamo_compiling() and inputs.first.device.type in self._settled:
            return None
        low = self._dtype
        if is_cast:
            low = None if inputs.low is None else inputs.low.dtype
        # With a sparse input the others have its dtype.
        is_low = is_cast and (inputs.is_plain or not plan.is_low)
        if low is None or not (is_low or target_dtype(plan, args, kwargs) in LOW_DTYPES):
            return None
        if (kwargs or self._first is None) and names_dtype(args, kwargs):
            return None  # the output has the requested dtype
        if self._is_always or self._is_slow(inputs, args, low):
            return inputs, low
        self._settle(inputs.first.device, low)
        return None

    def _is_slow(self, inputs: Inputs, args: Args, dtype: torch.dtype) -> bool:
        """Whether torch's kernel for a low-precision call is slow, and the program stays on this machine."""
        how, device, kind = traced(), inputs.first.device, self._kind
        if how in FOR_FILES:
            return False
        if not self._rounds_inputs and is_watched():
            return self._is_ever_slow(device, dtype)
        training = inputs.is_learning or is_training()
        pair = () if self._first is None else args[self._first : self._first + 2]
        if len(pair) == 2 and all([isinstance(m, Tensor) and not m.is_nested for m in pair]):  # noqa: C419
            a, b = pair
            if (
                not how
                and a.numel() * b.numel() // max(1, a.shape[-1] if a.dim() else 1) <= SMALL_PRODUCT
            ):
                return False
            if not training and (how or self._is_natively_fast(b)) and _is_skinny(a, how):
                kind = "gemv"
        known = known_capability(kind, device, dtype)
        return known.slow_in_training if training else known.slow_in_inference

    def _is_ever_slow(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether ``"auto"`` would legalize some call on this device."""
        kinds = (self._kind, "gemv") if self._kind == "gemm" else (self._kind,)
        known = [known_capability(kind, device, dtype) for kind in kinds]
        return any([each.slow_in_training or each.slow_in_inference for each in known])  # noqa: C419

    def _settle(self, device: torch.device, dtype: torch.dtype) -> None:
        """Ends legalization where an unlegalized call proves that no call on any device type is legalized."""
        if self._dtype is None or traced() or self._is_ever_slow(device, dtype):
            return
        if known_capability(self._kind, device, dtype) is UNMEASURED:
            return
        if is_reported_of_all(device.type, dtype):
            self._settled.add(device.type)
        if self._settled >= self._plan.device_types:
            self._control.settle()

    # --- how they are computed -------------------------------------------------------------------

    def _compute(  # noqa: PLR0917  # all there is to one call
        self,
        function: Callable[..., Any],
        inputs: Inputs,
        args: Args,
        kwargs: Kwargs,
        given: Args,
        dtype: torch.dtype,
        *,
        is_cast: bool,
    ) -> Any:
        """Returns the result in the low-precision ``dtype``; ``given`` are the arguments before casts."""
        if not is_dynamo_compiling():
            COMPUTED.is_legalized = True
        how, rounds = traced(), self._rounds_inputs
        is_eager = not how and inputs.is_plain and transforms() is None
        if is_eager and not kwargs and (self._is_convolution or (self._is_linear and not is_cast)):
            result = self._layer(function, inputs, args, dtype, is_cast=is_cast)
            if result is not None:
                return result
        if not is_cast and rounds:
            args, kwargs = cast_args(self._plan, args, kwargs)
        elif not is_cast and is_watched():
            note_unrounded(self._op, self._to_be_cast(args, kwargs))
        # In graphs, rounding uses arithmetic, since compilers may elide round-trip casts.
        if how == "graph" and rounds:
            return in_graph(function, args, kwargs, dtype)
        # Transforms, jit tracing and tensor subclasses see only casts and the function.
        if how == "jit" or not inputs.is_plain or transforms() is not None:
            return computed_in_fp32(function, args, kwargs, dtype)
        result = None
        if not inputs.is_learning:
            result = self._inferring(function, args, kwargs, dtype)
        elif self._op == "linear" and len(args) > 1 and _is_large(*args[:2]) and not kwargs:
            result = linears.compute(args, given, dtype, rounds_inputs=rounds)
        if result is not None:
            return result
        if inputs.is_learning and hooks_refused() is None:  # autograd saves low-precision tensors
            is_product, splits = self._kind in PRODUCTS, self._kind == "attention"
            precision = Precision(dtype, self._upcast, is_product, rounds, splits)
            return keeping_low(function, args, kwargs, given, precision)
        return rounded(call_raised(function, args, kwargs, self._upcast), CAST[dtype])

    def _layer(
        self,
        function: Callable[..., Any],
        inputs: Inputs,
        args: Args,
        dtype: torch.dtype,
        *,
        is_cast: bool,
    ) -> Tensor | None:
        """Returns the result of a layer that rounds its parameters itself; else None."""
        rounds = self._rounds_inputs
        if self._is_linear and not rounds:
            return None
        if inputs.is_learning:
            if self._is_linear:
                return linears.compute(args, args, dtype, rounds_inputs=True)
            return convolutions.compute(self._op, function, args, dtype, rounds_inputs=rounds)
        if is_cast or not rounds or is_training():
            return None
        if self._is_linear:
            return linears.without_gradients(args, dtype)
        return convolutions.without_gradients(function, args, {}, dtype)

    def _inferring(
        self, function: Callable[..., Any], args: Args, kwargs: Kwargs, dtype: torch.dtype
    ) -> Any:
        """Returns the result of a product with a weight, in reused memory; else None."""
        op, is_convolution = self._op, self._op in CONVOLUTIONS
        # In training, sums must match those with gradients; modes may keep tensors in reused memory.
        if not (kwargs or is_training() or dispatch_modes()):
            result = None
            if is_convolution:
                result = None if traced() else convolutions.with_prepared(op, function, args, dtype)
            elif op in linears.BLOCKED:
                result = linears.in_blocks(op, args, dtype)
            if result is not None:
                return result
        if not is_convolution:
            return None
        return convolutions.without_gradients(function, args, kwargs, dtype)

    def _to_be_cast(self, args: Args, kwargs: Kwargs) -> list[Tensor]:
        given = floating_inputs(self._plan, args, kwargs)
        cast = floating_inputs(self._plan, *cast_args(self._plan, args, kwargs))
        return [a for a, b in zip(given, cast, strict=True) if a is not b]


def _is_large(x: Any, weight: Any) -> bool:
    """Whether `linears.compute` is faster for a linear layer of ``x`` with ``weight``."""
    try:
        n, k = weight.shape
        return bool(k and _numel(x) // k * (n if n > k else k) >= linears.LEAST)
    except raised_here(TypeError, ValueError, AttributeError):  # they are not a tensor and a matrix
        return False


def _is_skinny(a: Tensor, how: str) -> bool:
    """Whether the first matrix has so few rows that reading the second one dominates the product."""
    if how:  # a size of 1 is known, without a guard
        return all([size == 1 for size in a.shape[:-1]])  # noqa: C419  # Dynamo traces lists better
    return a.dim() > 0 and a.numel() <= linears.FEW_ROWS * a.shape[-1]
