"""Decides which calls are legalized: computed in fp32 and rounded.

Each call site has one `Legalization`, for its generated code and its runners.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from ...tensors import ELIGIBLE, LOW_DTYPES, Args, Kwargs
from ...torch_internals import is_jit_tracing, run_when_traced
from ...torch_state import is_training
from ..composition import Inputs, names_dtype
from ..graphs import is_exported, is_traced
from ..watching import is_watched
from . import capability, convolutions, linears
from .capability import PRODUCTS, SMALL_PRODUCT, Capability, Capturing

#: Ops of these kinds are slow in low precision if the hardware lacks it, for any policy that casts
#: their inputs to it.
SLOW_KINDS: Final = PRODUCTS | {"attention", "rnn"}

#: The values of ``legalize`` in `hmpx.convert`.
LEGALIZE_MODES: Final = ("auto", "always", "never", "fast")


def may_be_legalized(mode: str, kind: str, *, is_low: bool, follows_inputs: bool) -> bool:
    """Whether calls of a site may be legalized: all run low (``is_low``), or in their inputs' dtype."""
    may_be_low = is_low or (follows_inputs and kind in SLOW_KINDS)
    return mode != "never" and may_be_low


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
            return _always
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
        known = known_capability(self._kind, device, dtype)
        training = is_training()
        matrices = self._matrices(args)
        if matrices is not None:
            a, b = matrices
            traced = is_traced()
            if not traced and _work(a, b) <= SMALL_PRODUCT:
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


def has_own_gradients(x: Any, weight: Any) -> bool:
    """Whether a convolution may take uncast inputs, which saves the cast of its weight."""
    if torch.compiler.is_dynamo_compiling() or is_jit_tracing():
        return False
    if torch.is_grad_enabled():
        return convolutions.is_large(x, weight)
    return _is_wide(weight) and linears.is_large_weight(weight)


def has_own_products(x: Any, weight: Any) -> bool:
    """Whether a linear layer may take uncast inputs, which saves the cast of its weight."""
    if torch.compiler.is_dynamo_compiling() or is_jit_tracing() or not _is_wide(weight):
        return False
    return (
        linears.is_large(x, weight) if torch.is_grad_enabled() else linears.is_large_weight(weight)
    )


def _is_wide(weight: Any) -> bool:
    return type(weight) is nn.Parameter and weight.dtype is torch.float32


def _never(first: Any) -> bool:
    return False


def _always(*args: object) -> bool:
    return True


def is_slow(kind: str, device: str, dtype: torch.dtype) -> bool:
    """Whether ``"auto"`` would legalize some op of this kind on this device."""
    known = {known_capability(name, device, dtype) for name in (kind, _SKINNY.get(kind, kind))}
    return any(each.is_slow(training=training) for each in known for training in (True, False))


_SKINNY: Final = {"gemm": "gemv"}


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


def _work(a: Tensor, b: Tensor) -> int:
    """Returns the approximate number of multiplications of a product."""
    return a.numel() * b.numel() // max(1, a.shape[-1] if a.dim() else 1)
