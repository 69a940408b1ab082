"""Lookup tables for activations of bfloat16 tensors on the CPU, bit-identical to torch's kernels.

With vector instructions for float32 alone, activations of bfloat16 are slower than of float32. There are only
65,536 bfloat16 numbers: a table holds the result of torch's own kernel for each. Whether a table of derivatives
can replace the backward is tested with every significand of a gradient.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from ...number_formats import bfloat16_kernels
from ...tensors import Kwargs, is_in_memory
from ...torch_internals import (
    has_tangents,
    is_any_autocast_enabled,
    is_batch,
    is_jit_tracing,
)
from ...torch_state import without_casts
from .scratch import is_seen

if TYPE_CHECKING:
    from ...number_formats import Bfloat16Kernels

# Read before anything is patched: op lists may name any of them.
_empty_like, _numel = torch.empty_like, Tensor.numel
_BF16, _F32, _BITS = torch.bfloat16, torch.float32, torch.int16

#: Ops of one tensor with a `..._backward` operator that takes the gradient and that tensor.
ACTIVATIONS: Final = ("gelu", "mish", "silu")

#: Elements of a tensor; below this, the call itself dominates.
_LEAST: Final = 1 << 14

#: Torch's kernels compute the elements after the last whole vector by other instructions.
_VECTOR: Final = 32

#: Elements that torch's kernels compute before tables are built, which takes as long.
_UNTIL: Final = 1 << 24

#: Keyword arguments that activations may have.
_KEYWORDS: Final[tuple[Kwargs, ...]] = ({}, {"approximate": "none"}, {"approximate": "tanh"})

_NUMBERS: Final = 1 << 16

#: The number of significands of bfloat16, and how many are tested at once.
_SIGNIFICANDS: Final = 128
_AT_ONCE: Final = 16

#: Factor that keeps products with even the smallest derivative normal.
_LARGE: Final = 2.0**64

#: Other test gradients: signs, sizes and special values.
_OTHERS: Final = (-1.5, 0.0, -0.0, 2.0**-70 * 1.25, -(2.0**100), float("inf"), float("nan"))

#: A table must take at most this share of the kernel's time.
_WORTHWHILE: Final = 0.8


def looked_up(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns torch's ``function`` for an op of `ACTIVATIONS`, with lookup tables for large calls."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or len(args) != 1:
            return function(*args, **kwargs)
        x = args[0]
        if type(x) is not Tensor or x.dtype is not _BF16 or not _is_computed_here(x):
            return function(*args, **kwargs)
        activation = _activation(op, kwargs)
        result = None if activation is None else activation.compute(x)
        return function(*args, **kwargs) if result is None else result

    return run


def _is_computed_here(x: Tensor) -> bool:
    size = _numel(x)
    if size < _LEAST or size % _VECTOR or not (x.is_cpu and x.is_contiguous()):
        return False
    return is_in_memory(x) and not (
        is_seen() or has_tangents() or is_jit_tracing() or is_any_autocast_enabled()
    )


class _Activation:
    def __init__(self, op: str, keywords: Kwargs) -> None:
        self._keywords = dict(keywords)
        self._kernel = getattr(torch.ops.aten, op).default
        self._gradient_kernel = getattr(torch.ops.aten, f"{op}_backward").default
        self._seen = 0  # elements
        self._tables: Tables | None = None
        self._lock = threading.Lock()

    def compute(self, x: Tensor) -> Tensor | None:
        """Returns the activation of a contiguous tensor; None to leave it to torch's kernel."""
        found = self._tables
        if found is None:
            size = _numel(x)
            self._seen += size
            kernels = bfloat16_kernels()
            if kernels is None or self._seen < _UNTIL or (found := self._made(kernels)) is None:
                return None
        if x.requires_grad and torch.is_grad_enabled():
            if found.derivatives is None:
                return None
            apply: Callable[..., Tensor] = LookedUp.apply
            return apply(x, self, found)
        return None if found.values is None else self.forward(x, found)

    def forward(self, x: Tensor, found: Tables) -> Tensor:
        """Returns the activation of ``x``."""
        if found.values is None:
            return self._by_torch(x)
        return found.kernels.look_up(x, _empty_like(x), found.values)

    def backward(self, gradient: Tensor, x: Tensor) -> Tensor:
        """Returns the gradient of ``x`` by torch's kernel."""
        result: Tensor = self._gradient_kernel(gradient, x, **self._keywords)
        return result

    def differentiable_backward(self, gradient: Tensor, x: Tensor) -> Tensor:
        """Returns the gradient of ``x`` by autograd, since torch's kernel may have no derivative."""
        with torch.enable_grad():
            (result,) = torch.autograd.grad(self._by_torch(x), x, gradient, create_graph=True)
        return result

    def _by_torch(self, x: Tensor) -> Tensor:
        result: Tensor = self._kernel(x, **self._keywords)
        return result

    def _made(self, kernels: Bfloat16Kernels) -> Tables | None:
        if not self._lock.acquire(blocking=False):
            return None  # another thread builds them
        try:
            self._tables = made(self._by_torch, self.backward, kernels)
        finally:
            self._lock.release()
        return self._tables


#: Op, and index in `_KEYWORDS` -> the activation, for all conversions.
_activations: Final[dict[tuple[str, int], _Activation]] = {}


def _activation(op: str, keywords: Kwargs) -> _Activation | None:
    if keywords not in _KEYWORDS:
        return None
    key = op, _KEYWORDS.index(keywords)
    found = _activations.get(key)
    return found or _activations.setdefault(key, _Activation(op, keywords))


class LookedUp(torch.autograd.Function):
    """An activation and its gradient by lookup."""

    drawn_as = "activation"

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: _Activation, found: Tables) -> Tensor:
        """Returns the activation."""
        ctx.save_for_backward(x)
        ctx.activation, ctx.found = activation, found
        return activation.forward(x, found)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Returns the gradient of `forward`'s first input."""
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return ctx.activation.differentiable_backward(gradient, x), None, None
        is_plain = type(gradient) is Tensor and gradient.is_contiguous() and x.is_contiguous()
        if not (is_plain and is_in_memory(gradient)) or is_seen() or is_batch(gradient):
            return ctx.activation.backward(gradient, x), None, None
        found: Tables = ctx.found
        assert found.derivatives is not None
        result = found.kernels.scale(x, gradient, _empty_like(x), found.derivatives)
        return result, None, None


# --- tables ----------------------------------------------------------------------------------------

_Backward = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Tables:
    """The lookup tables of one function.

    Attributes:
        values: bfloat16: its values in the order of the numbers' bits; None if torch's kernel is as
            fast.
        derivatives: float32: the factors for gradients; None if torch's kernel is as fast, or no factor
            gives the same bits.
    """

    values: Tensor | None
    derivatives: Tensor | None
    kernels: Bfloat16Kernels  # the lookup kernels


def made(
    forward: Callable[[Tensor], Tensor], backward: _Backward, kernels: Bfloat16Kernels
) -> Tables:
    """Returns the tables of a function with these torch kernels, on the CPU; takes some 50 ms."""
    with torch.no_grad(), torch.inference_mode(False), without_casts():
        bits = torch.arange(_NUMBERS, dtype=torch.int32, device="cpu").to(_BITS)
        many = bits.view(_BF16).expand(_AT_ONCE, _NUMBERS).contiguous()
        values, out = forward(many[0]), torch.empty_like(many)
        looked_up = _time(lambda: kernels.look_up(many, out, values))
        is_worthwhile = looked_up <= _WORTHWHILE * _time(lambda: forward(many))
        derivatives = _derivatives(many, backward, kernels)
    return Tables(values if is_worthwhile else None, derivatives, kernels)


def _derivatives(many: Tensor, backward: _Backward, kernels: Bfloat16Kernels) -> Tensor | None:
    """Returns the factors for gradients, for all numbers; None if they are slower, or give other bits."""
    numbers, out = many[0], torch.empty_like(many)
    fractions = torch.arange(_SIGNIFICANDS, dtype=_F32, device="cpu") / _SIGNIFICANDS
    gradients = ((1 + fractions) * _LARGE).to(_BF16)[:, None]
    found = backward(torch.ones_like(numbers, dtype=_F32), numbers.to(_F32))
    part = gradients[:_AT_ONCE].expand_as(many).contiguous()
    looked_up = _time(lambda: kernels.scale(many, part, out, found))
    if looked_up > _WORTHWHILE * _time(lambda: backward(part, many)):
        return None

    def fits(source: Tensor, gradient: Tensor, derivatives: Tensor) -> Tensor:
        """Whether the kernel's results equal the table's, for each element of the last dimension."""
        by_table = kernels.scale(source, gradient, torch.empty_like(source), derivatives)
        return (_plain(by_table) == _plain(backward(gradient, source))).all(0)

    is_right = torch.ones_like(numbers, dtype=torch.bool)
    for first in range(0, _SIGNIFICANDS, _AT_ONCE):
        part = gradients[first : first + _AT_ONCE].expand_as(many).contiguous()
        is_right &= fits(many, part, found)
    wrong = (~is_right).nonzero()[:, 0]
    if len(wrong):
        few = numbers[wrong].expand(_SIGNIFICANDS, len(wrong)).contiguous()
        part = gradients.expand_as(few).contiguous()
        results = backward(part, few)
        for guess in (_between(gradients, results), results[0].to(_F32) / _LARGE):
            is_better = fits(few, part, found.index_copy(0, wrong, guess)) & ~is_right[wrong]
            found[wrong] = torch.where(is_better, guess, found[wrong])
            is_right[wrong] |= is_better
    others = torch.tensor(_OTHERS, dtype=_BF16, device="cpu")[:, None].expand(-1, _NUMBERS)
    source = numbers.expand_as(others).contiguous()
    is_right &= fits(source, others.contiguous(), found)
    return found if is_right.all() else None


def _between(gradients: Tensor, results: Tensor) -> Tensor:
    """Returns float32 factors that turn positive gradients [g, 1] into the results [g, n], if they exist."""
    bits, exact, by = results.view(_BITS).int(), results.double(), gradients.double()
    away, back = (
        (exact + (bits + step).to(_BITS).view(_BF16).double()) / 2 / by for step in (1, -1)
    )
    low, high = torch.minimum(away, back).amax(0), torch.maximum(away, back).amin(0)
    return ((low + high) / 2).to(_F32)


def _plain(results: Tensor) -> Tensor:
    """Returns the bits of bfloat16 results, with the NaN bits that casts produce."""
    nan = torch.full((1,), float("nan"), dtype=_F32, device="cpu").to(_BF16).view(_BITS)
    return results.view(_BITS).masked_fill(results.isnan(), nan[0])


def _time(run: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(3):
        start = time.thread_time()
        run()
        best = min(best, time.thread_time() - start)
    return best
