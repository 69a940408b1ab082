"""Legalized calls: which ones are computed in fp32 from rounded inputs, then rounded; and how.

The numerics are those of hardware that multiplies in low precision and accumulates in fp32. Rounded are every
input (already in the low-precision dtype here), the output, the incoming gradient, and each outgoing gradient.
Autograd saves tensors in the low-precision dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from ...tensors import CAST, ELIGIBLE, LOW_DTYPES, Args, Kwargs
from ...torch_internals import (
    dispatch_modes,
    hooks_refused,
    is_jit_tracing,
    run_when_traced,
    transforms,
)
from ...torch_state import is_training
from ..composition import (
    Inputs,
    call_raised,
    computed_in_fp32,
    in_graph,
    is_exported,
    is_traced,
    names_dtype,
    rounded,
    widen,
    widen_matrices,
)
from ..saved_tensors import Precision, keeping_low
from ..watching import is_watched
from . import capability, convolutions, linears
from .capability import PRODUCTS, SMALL_PRODUCT, Capability, Capturing

#: Ops of these kinds are slow in low precision if the hardware lacks it, for any policy that casts
#: their inputs to it.
SLOW_KINDS: Final = PRODUCTS | {"attention", "rnn"}

#: The values of ``legalize`` in `hmpx.convert`.
LEGALIZE_MODES: Final = ("auto", "always", "never", "fast")

#: Kind -> that of its calls with few rows.
_SKINNY: Final = {"gemm": "gemv"}


def may_be_legalized(mode: str, kind: str, *, is_low: bool, follows_inputs: bool) -> bool:
    """Whether calls of a site may be legalized: all run low (``is_low``), or in their inputs' dtype."""
    may_be_low = is_low or (follows_inputs and kind in SLOW_KINDS)
    return mode != "never" and may_be_low


# --- which calls -------------------------------------------------------------------------------


class Legalization:
    """Decides which calls of one site are legalized.

    Attributes:
        settled: Device types that never need legalization at this site.
        may_apply: Whether the product of two matrices may be legalized, judged by their sizes alone.
        leaves_inference: Whether a call is left to torch's kernels because it is not training; called
            with the call's first argument.
    """

    def __init__(
        self,
        kind: str,
        first_matrix: int | None,
        mode: str,
        dtype: torch.dtype | None,
        device_types: frozenset[str],
        *,
        is_linear: bool = False,
    ) -> None:
        """Starts with no device type settled.

        Args:
            kind: One of `capability.KINDS`.
            first_matrix: For a product of two matrices, the position of the first.
            mode: One of `LEGALIZE_MODES`.
            dtype: The low-precision dtype of all calls; None if their inputs decide.
            device_types: The device types whose tensors are cast.
            is_linear: The second matrix is a linear layer's, [n, k], rather than [k, n].
        """
        self._is_linear = is_linear
        self._kind, self._first_matrix, self._mode = kind, first_matrix, mode
        self._dtype, self._device_types = dtype, device_types
        self.settled: set[str] = set()
        self.may_apply = self._size_test()
        is_product = first_matrix is not None
        self.leaves_inference = _never if is_product else self._inference_test(kind)

    # --- before a call is examined closely ---------------------------------------------------------

    def is_open(self, first: Any) -> bool:
        """Whether a call with this first input may be legalized, judged by its device alone."""
        if torch.compiler.is_dynamo_compiling():  # avoids guards on `settled`
            return True
        # After a tensor of another dtype, the next input decides.
        return (
            getattr(first, "dtype", None) not in ELIGIBLE or first.device.type not in self.settled
        )

    def _size_test(self) -> Callable[[Any, Any], bool]:
        if self._mode == "always":
            return lambda a, b: True
        leaves_inference = self._inference_test("gemv")
        is_fast = self._mode == "fast"

        def may_apply(a: Any, b: Any) -> bool:
            if torch.compiler.is_dynamo_compiling():
                return True  # avoids guards on sizes
            try:
                size, columns = a.numel(), a.shape[-1]
                if type(size) is not int:
                    return True  # torch.jit.trace has tensors as sizes, graphs have symbols
                if size * b.numel() <= SMALL_PRODUCT * columns:
                    return is_fast and is_watched()
            except (AttributeError, IndexError, RuntimeError):
                return True  # not matrices; nested tensors have no sizes
            if size > linears.FEW_ROWS * columns or not leaves_inference(b) or is_traced():
                return True
            return self._is_read_once(b) or not self._is_read_along_sums(b)

        return may_apply

    def _inference_test(self, kind: str) -> Callable[[Any], bool]:
        if self._mode == "always" or self._device_types != {"cpu"}:
            return _never
        known, is_fast = self._dtype, self._mode == "fast"

        def leaves_inference(first: Any) -> bool:
            if is_training() or (is_fast and is_watched()):
                return False
            dtype = getattr(first, "dtype", None) if known is None else known
            if dtype not in LOW_DTYPES:
                return False
            return not known_capability(kind, "cpu", dtype).is_slow(training=False)

        return leaves_inference

    # --- for one call ------------------------------------------------------------------------------

    def is_settled(self, device_type: str) -> bool:
        """Whether calls on devices of this type are never legalized."""
        return not torch.compiler.is_dynamo_compiling() and device_type in self.settled

    def applies(self, inputs: Inputs, args: Args, kwargs: Kwargs, dtype: torch.dtype) -> bool:
        """Whether a low-precision call in ``dtype`` is legalized."""
        if names_dtype(args, kwargs):
            return False  # the output has the requested dtype
        if self._mode == "always":
            return True
        if is_exported():
            return False
        device = capability.name_of(inputs.first.device)
        if self._mode == "fast" and is_watched():
            return is_slow(self._kind, device, dtype)
        known, training = known_capability(self._kind, device, dtype), is_training()
        matrices = self._matrices(args)
        if matrices is not None:
            (a, b), traced = matrices, is_traced()
            work = a.numel() * b.numel() // max(1, a.shape[-1] if a.dim() else 1)
            if not traced and work <= SMALL_PRODUCT:
                return False
            is_fast = traced or (self._is_read_along_sums(b) and not self._is_read_once(b))
            if not training and is_fast and _is_skinny(a, is_traced=traced):
                known = known_capability("gemv", device, dtype)
        return known.is_slow(training=training)

    def settles(self, inputs: Inputs, dtype: torch.dtype) -> bool:
        """Whether this unlegalized call proves that no call on any device type is legalized."""
        if self._mode == "always" or self._dtype is None or is_traced() or is_exported():
            return False
        device_type = inputs.first.device.type
        if is_slow(self._kind, capability.name_of(inputs.first.device), dtype):
            return False
        if not capability.is_reported_of_all(device_type, dtype):
            return False
        self.settled.add(device_type)
        return self.settled >= self._device_types

    def _is_read_once(self, weight: Any) -> bool:
        """Whether a product of few rows with a weight needs no cast of the weight, unlike a native kernel."""
        if self._mode != "auto" or self._dtype is None or not self._is_linear:
            return False
        return linears.is_read_once(weight, self._dtype)

    def _is_read_along_sums(self, b: Tensor) -> bool:
        """Whether the summed elements of the second matrix are adjacent, as fast native kernels require."""
        if b.dim() < 2 or b.is_nested or b.layout is not torch.strided:
            return True
        return b.stride(-1 if self._is_linear else -2) == 1

    def _matrices(self, args: Args) -> tuple[Tensor, Tensor] | None:
        if self._first_matrix is None:
            return None
        pair = args[self._first_matrix : self._first_matrix + 2]
        if len(pair) < 2 or not all([isinstance(m, Tensor) and not m.is_nested for m in pair]):  # noqa: C419
            return None
        return pair


def _never(first: Any) -> bool:
    return False


def has_own_gradients(x: Any, weight: Any) -> bool:
    """Whether a convolution may take uncast inputs, which saves the cast of its weight."""
    if torch.compiler.is_dynamo_compiling() or is_jit_tracing():
        return False
    if torch.is_grad_enabled():
        return convolutions.is_large(x, weight)
    is_wide = type(weight) is nn.Parameter and weight.dtype is torch.float32
    return is_wide and linears.is_large_weight(weight)


def has_own_products(x: Any, weight: Any) -> bool:
    """Whether a linear layer may take uncast inputs, which saves the cast of its weight."""
    if type(weight) is not nn.Parameter or weight.dtype is not torch.float32:
        return False
    if torch.compiler.is_dynamo_compiling() or is_jit_tracing():
        return False
    if torch.is_grad_enabled():
        return linears.is_large(x, weight)
    return linears.is_large_weight(weight)


def is_slow(kind: str, device: str, dtype: torch.dtype) -> bool:
    """Whether ``"auto"`` would legalize some op of this kind on this device."""
    known = {known_capability(name, device, dtype) for name in (kind, _SKINNY.get(kind, kind))}
    return any(each.is_slow(training=training) for each in known for training in (True, False))


def known_capability(kind: str, device: str, dtype: torch.dtype) -> Capability:
    """Returns the device's capability for ops of ``kind``; an empty one while a measurement must not run."""
    try:
        return capability.capability(kind, device, dtype)
    except Capturing:
        return Capability(None)


run_when_traced(known_capability)


def _is_skinny(a: Tensor, *, is_traced: bool) -> bool:
    """Whether the first matrix has so few rows that reading the second one dominates the product."""
    if is_traced:  # a size of 1 is known, without a guard
        return all([size == 1 for size in a.shape[:-1]])  # noqa: C419  # Dynamo traces lists better
    return a.dim() > 0 and a.numel() <= linears.FEW_ROWS * a.shape[-1]


# --- how they are computed ---------------------------------------------------------------------


class Legalizer:
    """Computes one op in fp32.

    Attributes:
        rounds_inputs: fp32 inputs are rounded first.
    """

    __slots__ = ("_kind", "_op", "_upcast", "rounds_inputs")

    def __init__(self, op: str, kind: str, mode: str) -> None:
        self._op, self._kind, self.rounds_inputs = op, kind, mode != "fast"
        self._upcast = widen_matrices if kind == "gemm" else widen

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
        is_linear = self._op == "linear" and self.rounds_inputs and not is_cast
        is_layer = is_linear or self._op in convolutions.CONVOLUTIONS
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
        rounds = self.rounds_inputs
        if is_linear:
            return linears.compute(args, args, dtype, rounds_inputs=True)
        return convolutions.compute(self._op, function, args, dtype, rounds_inputs=rounds)

    def compute(  # noqa: PLR0917  # all there is to one call
        self,
        function: Callable[..., Any],
        inputs: Inputs,
        args: Args,
        kwargs: Kwargs,
        given: Args,
        dtype: torch.dtype,
    ) -> Any:
        """Returns the result in the low-precision ``dtype``; ``given`` are the arguments before casts."""
        rounds = self.rounds_inputs
        # In graphs, rounding uses arithmetic, since compilers may elide round-trip casts.
        if is_traced() and rounds and not is_exported():
            return in_graph(function, args, kwargs, dtype)
        # Transforms, jit tracing and tensor subclasses see only casts and the function.
        if not inputs.is_plain or transforms() is not None or is_jit_tracing():
            return computed_in_fp32(function, args, kwargs, dtype)
        result = None
        if not inputs.is_learning:
            result = self._inferring(function, args, kwargs, dtype)
        elif self._op == "linear" and not kwargs:
            result = linears.compute(args, given, dtype, rounds_inputs=rounds)
        if result is not None:
            return result
        if inputs.is_learning and hooks_refused() is None:  # autograd saves low-precision tensors
            is_product, splits = self._kind in PRODUCTS, self._kind == "attention"
            precision = Precision(dtype, self._upcast, is_product, rounds, splits)
            return keeping_low(function, args, kwargs, given, precision)
        return rounded(call_raised(function, args, kwargs, self._upcast), CAST[dtype])

    def _inferring(
        self, function: Callable[..., Any], args: Args, kwargs: Kwargs, dtype: torch.dtype
    ) -> Any:
        """Returns the result of a product with a weight, in reused memory; else None."""
        op, is_convolution = self._op, self._op in convolutions.CONVOLUTIONS
        # In training, sums must match those with gradients; modes may keep tensors in reused memory.
        if not (kwargs or is_training() or dispatch_modes()):
            result = None
            if is_convolution and convolutions.is_any_prepared() and not is_traced():
                result = convolutions.with_prepared(op, function, args, dtype)
            elif op in linears.BLOCKED:
                result = linears.in_blocks(op, args, dtype)
            if result is not None:
                return result
        if not is_convolution:
            return None
        return convolutions.without_gradients(function, args, kwargs, dtype)
