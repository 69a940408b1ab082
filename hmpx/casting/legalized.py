"""Legalized calls of one site: which ones are computed in fp32 from rounded inputs, then rounded; and how.

The numerics are those of hardware that multiplies in low precision and accumulates in fp32. Rounded are every
input, the output, the incoming gradient, and each outgoing gradient. Autograd saves tensors in the low-precision
dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..compute import (
    COMPUTED,
    CONVOLUTIONS,
    FEW_ROWS,
    FOR_FILES,
    PRODUCTS,
    SMALL_PRODUCT,
    UNMEASURED,
    Inputs,
    Precision,
    call_raised,
    computed_in_fp32,
    convolution,
    in_graph,
    in_reused_memory,
    inputs_of,
    is_large,
    is_read_once,
    is_reported_of_all,
    is_watched,
    keeping_low,
    known_capability,
    linear,
    names_dtype,
    note_unrounded,
    rounded,
    traced,
    widen,
    widen_matrices,
)
from ..errors import raised_here
from ..tensors import CAST, ELIGIBLE, LOW_DTYPES, Args, Kwargs
from ..torch_internals import hooks_refused, is_mapped, transforms
from ..torch_state import is_below_dispatcher
from .inputs import (
    cast_args,
    dtypes_after_casts,
    floating_inputs,
    target_dtype,
    usual_caster,
    written,
)
from .plan import CallPlan
from .retiring import Control

#: Runs torch's function, its first argument, on cast arguments; the original ones come last.
Runner = Callable[[Callable[..., Any], Args, Kwargs, Args, Kwargs], Any]

# Read before anything is patched.
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
        self._is_on_several, self._rounds_late = len(plan.device_types) > 1, plan.rounds_late
        self._cast_usual = usual_caster(plan) if plan.rounds_late else None
        self._upcast = widen_matrices if self._kind == "gemm" else widen
        self._settled: set[str] = set()  # device types of which no call is ever legalized
        control.may_apply = self.may_apply

    def run(
        self, function: Callable[..., Any], args: Args, kwargs: Kwargs, given: Args, named: Kwargs
    ) -> Any:
        """Runs a call; with ``rounds_late`` of its plan its inputs are uncast."""
        is_cast = True
        is_open = self._control.legalizes and not (self._is_on_several and self._is_settled(args))
        if is_open and self._first is not None and len(args) > self._first + 1:
            is_open = self.may_apply(args[self._first], args[self._first + 1])
        if self._rounds_late:
            is_cast = not (is_open and self._takes_uncast(args))
            cast = self._cast_usual(args, kwargs) if is_cast and self._cast_usual else None
            if cast is args:  # left alone
                return function(*args, **kwargs)
            if cast is not None:
                args = cast
            elif is_cast:
                args, kwargs = cast_args(self._plan, args, kwargs)
        found = self._route(args, kwargs, is_cast=is_cast) if is_open else None
        if found is not None:
            inputs, dtype = found
            return self._compute(function, inputs, args, kwargs, given, dtype, is_cast=is_cast)
        if not is_cast:
            args, kwargs = cast_args(self._plan, args, kwargs)
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
            if type(size) is not int or size * b.numel() > SMALL_PRODUCT * columns:
                return True  # torch.jit.trace has tensors as sizes, graphs have symbols
        except raised_here(AttributeError, IndexError, RuntimeError):
            return True  # not matrices; nested tensors have no sizes
        return not self._rounds_inputs and is_watched()

    def _takes_uncast(self, args: Args) -> bool:
        """Whether a call takes uncast inputs, which saves a layer the cast of its weight."""
        if not self._rounds_inputs:
            # Under transforms the cast decides whether an addend stays fp32.
            return not (self._plan.facts.addends and transforms() is not None)
        if len(args) < 2 or traced():  # avoids guards on sizes
            return False
        x, weight = args[:2]
        if self._op != "linear":
            return is_large(x, weight)
        return self._dtype is not None and is_read_once(x, weight, self._dtype)

    def _route(
        self, args: Args, kwargs: Kwargs, *, is_cast: bool
    ) -> tuple[Inputs, torch.dtype] | None:
        """Returns the inputs and the low-precision dtype of a call that is legalized; None for any other call.

        Op, device, dtypes, sizes and layouts decide: a forward is the same whether or not gradients are recorded.
        """
        plan = self._plan
        if is_below_dispatcher():
            return None
        if (plan.may_write or kwargs) and written(plan, args, kwargs) is not None:
            return None
        inputs = inputs_of(args, kwargs)
        if inputs is None or inputs.first.device.type not in plan.device_types:
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
        if self._is_always:
            return inputs, low
        how, device = traced(), inputs.first.device
        if how in FOR_FILES:  # which may run on any machine
            return None
        kinds = (self._kind, "gemv") if self._kind == "gemm" else (self._kind,)
        if self._rounds_inputs or not is_watched():  # else whatever some call might do
            kinds = ("gemv",) if self._reads_weights(args, how) else kinds[:1]
        if any([known_capability(each, device, low).is_slow for each in kinds]):  # noqa: C419
            return inputs, low
        if not how:
            self._settle(device, low)
        return None

    def _reads_weights(self, args: Args, how: str) -> bool:
        """Whether a product mostly reads the second matrix, as native kernels do at half the bytes.

        That has its summed elements adjacent, and is not a linear layer's parameter, which may be rounded while it
        is read once.
        """
        if self._first is None or len(args) < self._first + 2:
            return False
        a, b = args[self._first : self._first + 2]
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.is_nested or b.is_nested:
            return False
        if how:  # a size of 1 is known, without a guard
            return all([size == 1 for size in a.shape[:-1]])  # noqa: C419  # Dynamo traces lists better
        if not a.dim() or a.numel() > FEW_ROWS * a.shape[-1]:
            return False
        if self._reads_once and self._dtype and is_read_once(a, b, self._dtype):
            return False
        is_dense = b.dim() > 1 and b.layout is torch.strided
        return not is_dense or bool(b.stride(-1 if self._op == "linear" else -2) == 1)

    def _settle(self, device: torch.device, dtype: torch.dtype) -> None:
        """Ends legalization where an unlegalized call proves that no call on any device type is legalized."""
        kinds = ("gemm", "gemv") if self._kind == "gemm" else (self._kind,)
        known = [known_capability(kind, device, dtype) for kind in kinds]
        is_open = any([each.is_slow or each is UNMEASURED for each in known])  # noqa: C419
        if self._dtype is None or is_open:
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
            control, device = self._control, inputs.first.device
            if device.type == "cpu" and control.forward is None and control.offered is not None:
                is_slow = self._is_always or known_capability(self._kind, device, dtype).is_slow
                control.nodes = control.offered if is_slow else None  # for the calls that follow
        how, rounds = traced(), self._rounds_inputs
        if not (is_cast or rounds) and is_watched():
            after = dtypes_after_casts(self._plan, args, kwargs)
            note_unrounded(self._op, [given for given, cast in after if given.dtype is not cast])
        is_eager = not how and inputs.is_plain and transforms() is None
        if is_eager and not kwargs and (self._is_linear or self._is_convolution):
            layer: Any = None
            if self._is_convolution:
                layer = convolution(self._op, function, args, dtype, rounds_inputs=rounds)
            elif rounds:
                layer = linear(args, dtype)
            if layer is not None:
                return layer
        if not is_cast and rounds:
            args, kwargs = cast_args(self._plan, args, kwargs)
        elif not is_cast and self._is_linear and args and not how and args[0].dim() > 2:
            args = (args[0].contiguous(), *args[1:])  # else torch's function depends on gradients
        if transforms() is not None and self._plan.facts.addends:
            floating = floating_inputs(self._plan, args, kwargs)
            if len({t.dtype for t in floating}) > 1 and any(map(is_mapped, floating)):
                return call_raised(function, args, kwargs, widen)  # the addend is in fp32
        # In graphs, rounding uses arithmetic, since compilers may elide round-trip casts.
        if how == "graph" and rounds:
            return in_graph(function, args, kwargs, dtype)
        # Transforms, jit tracing and tensor subclasses see only casts and the function.
        if how == "jit" or not inputs.is_plain or transforms() is not None:
            return computed_in_fp32(function, args, kwargs, dtype)
        if inputs.is_learning and hooks_refused() is None:  # autograd saves low-precision tensors
            is_product, splits = self._kind in PRODUCTS, self._kind == "attention"
            precision = Precision(dtype, self._upcast, is_product, rounds, splits)
            return keeping_low(function, args, kwargs, given, precision)
        first = self._first or 0
        if self._kind in PRODUCTS and is_large(*(*args, None, None, None)[first : first + 2]):
            return in_reused_memory(function, args, kwargs, dtype)
        return rounded(call_raised(function, args, kwargs, self._upcast), CAST[dtype])
