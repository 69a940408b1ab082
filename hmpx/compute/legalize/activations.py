"""Activations of bfloat16 tensors on the CPU, looked up in tables, to the same bits.

Vector instructions for float32 alone compute an activation of bfloat16 more slowly than of float32. What is
computed here, and when, is decided here; how tables are made in ``tables``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from ...number_formats import bfloat16_kernels
from ...tensors import Kwargs, is_in_memory
from ...torch_internals import (
    dispatch_modes,
    has_tangents,
    is_any_autocast_enabled,
    is_batch,
    is_jit_tracing,
    transforms,
)

if TYPE_CHECKING:
    from ...number_formats import Bfloat16Kernels
    from .tables import Tables

# Taken before anything is patched: op lists may name any of them.
_empty_like, _numel = torch.empty_like, Tensor.numel
_BF16 = torch.bfloat16

#: Ops of one tensor whose operator has a `..._backward` of the gradient and that tensor.
ACTIVATIONS: Final = ("gelu", "mish", "silu")

#: Elements of a tensor; below this, a call is what takes time.
_LEAST: Final = 1 << 14

#: Torch's kernels compute the last few elements by other instructions than whole vectors.
_VECTOR: Final = 32

#: Elements that torch's kernels have computed before tables are made, which takes as long.
_UNTIL: Final = 1 << 24

#: Keyword arguments that activations may have.
_KEYWORDS: Final[tuple[Kwargs, ...]] = ({}, {"approximate": "none"}, {"approximate": "tanh"})


def looked_up(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns torch's ``function`` of an op of `ACTIVATIONS`, such that large calls are looked up."""

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
        dispatch_modes()
        or transforms() is not None
        or has_tangents()
        or is_jit_tracing()
        or is_any_autocast_enabled()
    )


class _Activation:
    """One activation, with its keyword arguments."""

    def __init__(self, op: str, keywords: Kwargs) -> None:
        self._keywords = dict(keywords)
        self._kernel = getattr(torch.ops.aten, op).default
        self._gradient_kernel = getattr(torch.ops.aten, f"{op}_backward").default
        self._seen = 0  # elements
        self._tables: Tables | None = None
        self._lock = threading.Lock()

    def compute(self, x: Tensor) -> Tensor | None:
        """Returns the activation of a contiguous tensor; None if torch's kernel is to compute it."""
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
        """Returns the gradient of ``x`` by what torch derives: its kernels for that need have no derivative."""
        with torch.enable_grad():
            (result,) = torch.autograd.grad(self._by_torch(x), x, gradient, create_graph=True)
        return result

    def _by_torch(self, x: Tensor) -> Tensor:
        result: Tensor = self._kernel(x, **self._keywords)
        return result

    def _made(self, kernels: Bfloat16Kernels) -> Tables | None:
        if not self._lock.acquire(blocking=False):
            return None  # another thread makes them
        from . import tables  # what most programs never need

        try:
            self._tables = tables.made(self._by_torch, self.backward, kernels)
        finally:
            self._lock.release()
        return self._tables


#: Op, and which of `_KEYWORDS` -> the activation: whatever conversions there are.
_activations: Final[dict[tuple[str, int], _Activation]] = {}


def _activation(op: str, keywords: Kwargs) -> _Activation | None:
    """Returns an activation with these keyword arguments; None if it is not known."""
    if keywords not in _KEYWORDS:
        return None
    key = op, _KEYWORDS.index(keywords)
    found = _activations.get(key)
    return found or _activations.setdefault(key, _Activation(op, keywords))


class LookedUp(torch.autograd.Function):
    """An activation, and its gradient, looked up."""

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
        is_plain = type(gradient) is Tensor and gradient.is_contiguous() and x.is_contiguous()
        is_plain = is_plain and is_in_memory(gradient)
        is_seen = dispatch_modes() or transforms() is not None
        if torch.is_grad_enabled():
            return ctx.activation.differentiable_backward(gradient, x), None, None
        if is_seen or is_batch(gradient) or not is_plain:
            return ctx.activation.backward(gradient, x), None, None
        found: Tables = ctx.found
        assert found.derivatives is not None
        result = found.kernels.scale(x, gradient, _empty_like(x), found.derivatives)
        return result, None, None
