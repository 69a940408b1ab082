"""Low precision where a device lacks it: computed in fp32 from rounded inputs, and rounded.

The numerics are those of hardware that multiplies in low precision and accumulates in fp32. Rounded
are: every input (it comes here in the low-precision dtype), the output, the gradient that comes in
and each gradient that goes out. What autograd keeps is held in the low-precision dtype. Knows neither
lists nor how wrappers get into torch.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from ...tensors import CAST, Args, Kwargs
from ...torch_internals import (
    hooks_refused,
    is_graph_made,
    is_jit_tracing,
    run_when_traced,
    transforms,
)
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
from . import capability, convolutions
from .blocks import BLOCKED, in_blocks
from .capability import Capability, Capturing

if TYPE_CHECKING:
    pass

#: What `hmpx.convert` takes as ``legalize``.
LEGALIZE_MODES: Final = ("auto", "always", "never", "fast")


@dataclass(frozen=True, slots=True)
class Legalizer:
    """Computes one op in fp32 where its kernels for a low-precision dtype are slow.

    Attributes:
        op: Op name.
        kind: One of `capability.KINDS`.
        first_matrix: Of a product of two matrices, the position of the first.
        mode: One of `MODES` but ``"never"``.
    """

    op: str
    kind: str
    first_matrix: int | None
    mode: str

    def applies(self, inputs: Inputs, args: Args, kwargs: Kwargs, dtype: torch.dtype) -> bool:
        """Whether to compute this call for ``dtype`` in fp32."""
        if torch.dtype in map(type, args) or kwargs.get("dtype") is not None:
            return False  # its output is as asked for
        if self.mode == "always":
            return True
        if is_exported():
            return False
        device = capability.name_of(inputs.first.device)
        if self.mode == "fast" and is_watched():
            return is_slow(self.kind, device, dtype)
        known = known_capability(self.kind, device, dtype)
        training = is_training()
        a, b = self._matrices(args)
        if a is not None and b is not None:
            traced = is_traced()
            if not traced and _work(a, b) <= capability.SMALL_PRODUCT:
                return False
            if not training and _is_skinny(a, is_traced=traced):
                known = known_capability("gemv", device, dtype)
        return known.is_slow(training=training)

    def _matrices(self, args: Args) -> tuple[Tensor | None, Tensor | None]:
        if self.first_matrix is None:
            return None, None
        pair = args[self.first_matrix : self.first_matrix + 2]
        if len(pair) < 2 or not all([isinstance(m, Tensor) and not m.is_nested for m in pair]):  # noqa: C419
            return None, None
        return pair

    def compute_convolution(
        self, function: Callable[..., Any], inputs: Inputs, args: Args, dtype: torch.dtype
    ) -> Tensor | None:
        """Returns the call's result in ``dtype`` where `convolutions` knows the call, else None.

        Args:
            function: torch's function.
            inputs: Those of the arguments.
            args: All arguments, as they were given or cast.
            dtype: The low-precision dtype.
        """
        if (
            not inputs.is_learning
            or not inputs.is_plain
            or self.op not in convolutions.CONVOLUTIONS
        ):
            return None
        if is_traced() or transforms() is not None or is_jit_tracing():
            return None
        rounds = self.mode != "fast"
        return convolutions.compute(self.op, function, args, dtype, rounds_inputs=rounds)

    def compute(  # noqa: PLR0917  # all there is to one call
        self,
        function: Callable[..., Any],
        inputs: Inputs,
        args: Args,
        kwargs: Kwargs,
        given: Args,
        dtype: torch.dtype,
    ) -> Any:
        """Returns the call's result in ``dtype``.

        Args:
            function: torch's function.
            inputs: Those of the arguments.
            args: Positional arguments, and
            kwargs: those given by name.
            given: The positional arguments before they were cast.
            dtype: The low-precision dtype.
        """
        if is_traced() and self.mode != "fast" and not is_exported():
            return in_graph(function, args, kwargs, dtype)
        if not inputs.is_plain or transforms() is not None or is_jit_tracing():
            return computed_in_fp32(function, args, kwargs, dtype)
        raise_one = widen_matrices if self.kind == "gemm" else widen
        if inputs.is_learning:
            if hooks_refused() is None:
                is_product = self.kind in capability.PRODUCTS
                precision = Precision(
                    dtype, raise_one, is_product, self.mode != "fast", self.kind == "attention"
                )
                return keeping_low(function, args, kwargs, given, precision)
        elif self.op in BLOCKED and not kwargs and not is_training():
            # Where it counts as training, sums are those that are computed with gradients.
            result = in_blocks(self.op, args, dtype)
            if result is not None:
                return result
        elif self.op in convolutions.CONVOLUTIONS:
            result = convolutions.without_gradients(function, args, kwargs, dtype)
            if result is not None:
                return result
        return rounded(call_raised(function, args, kwargs, raise_one), CAST[dtype])


#: What is called with the name of an op and the inputs that it was not to round.
Note = Callable[[str, list[Tensor]], None]

_watcher: Final = contextvars.ContextVar[Note | None]("hmpx_watcher", default=None)


@contextlib.contextmanager
def watched_rounding(note: Note) -> Iterator[None]:
    """Calls ``note`` wherever the mode ``"fast"`` leaves inputs unrounded, inside the block.

    Whether it does depends on a call's size, and on whether gradients are recorded. In the block
    every call is computed as those that do: what is rounded there is rounded in all calls.
    """
    token = _watcher.set(note)
    try:
        yield
    finally:
        _watcher.reset(token)


def is_watched() -> bool:
    """Whether the call is made in a block of `watched`."""
    return _watcher.get() is not None


def note_unrounded(op: str, inputs: list[Tensor]) -> None:
    """Passes on that ``op`` uses ``inputs`` unrounded, which otherwise would be rounded."""
    note = _watcher.get()
    if note is not None:
        note(op, inputs)


run_when_traced(is_watched)  # no compiled code is watched


def is_slow(kind: str, device: str, dtype: torch.dtype) -> bool:
    """Whether any ops of ``kind`` are computed in fp32 there, where that is up to what is fast."""
    known = {known_capability(name, device, dtype) for name in (kind, _SKINNY.get(kind, kind))}
    return any(each.is_slow(training=training) for each in known for training in (True, False))


_SKINNY: Final = {"gemm": "gemv"}


def known_capability(kind: str, device: str, dtype: torch.dtype) -> Capability:
    """Returns what is known of ops of ``kind``, measured at the first question.

    Where a CUDA graph is being captured, what was not asked before is left to torch's kernels.
    """
    try:
        return capability.capability(kind, device, dtype)
    except Capturing:
        return Capability(None)


run_when_traced(known_capability)


def is_slow_in_inference(kind: str, dtype: torch.dtype) -> bool:
    """Whether ops of ``kind`` are computed in fp32 on the CPU where nothing is trained."""
    return known_capability(kind, "cpu", dtype).is_slow(training=False)


def is_traced() -> bool:
    """Whether the call becomes part of a graph, by Dynamo or by what it calls."""
    if torch.compiler.is_dynamo_compiling():
        return True
    return is_graph_made()


def is_exported() -> bool:
    """Whether the call becomes part of an artefact, for whatever hardware it will come to."""
    if torch.compiler.is_exporting() or is_jit_tracing():
        return True
    if torch.compiler.is_dynamo_compiling():
        return False
    onnx = sys.modules.get("torch.onnx")
    return onnx is not None and onnx.is_in_onnx_export()


def _is_skinny(a: Tensor, *, is_traced: bool) -> bool:
    """Whether the product reads its second matrix for next to no rows of the first."""
    if is_traced:  # a size of 1 is known, without a guard
        return all([size == 1 for size in a.shape[:-1]])  # noqa: C419  # Dynamo knows lists better
    return a.dim() > 0 and a.numel() <= 2 * a.shape[-1]


def _work(a: Tensor, b: Tensor) -> int:
    """Returns about how many multiplications a product has."""
    return a.numel() * b.numel() // max(1, a.shape[-1] if a.dim() else 1)
