"""Linear layers in training: a product and its gradients, in fp32 memory that is kept from call to call.

The rounding points are those of `legalize`, the products those that torch makes of a linear layer and of
its backward, so the results are the same bit for bit; autograd saves low-precision tensors. Independent
of which layers are computed this way, and why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from ...tensors import CAST, ELIGIBLE, Args
from ...torch_internals import dispatch_modes, has_tangents, is_batch, transforms
from ..composition import widen
from .blocks import in_blocks, in_one_pass
from .rounding import Rounding
from .scratch import New, Temporaries

# Taken before anything is patched: op lists may name any of them.
_addmm, _mm, _sum = torch.addmm, torch.mm, torch.sum
_contiguous, _numel, _reshape, _t = Tensor.contiguous, Tensor.numel, Tensor.reshape, Tensor.t

#: Elements of the input or the output; below this, allocating memory costs less than the bookkeeping here.
_LEAST: Final = 1 << 17


def is_large(x: Any, weight: Any) -> bool:
    """Whether `compute` is faster for a linear layer of ``x`` with ``weight``."""
    try:
        n, k = weight.shape
        return bool(k and _numel(x) // k * (n if n > k else k) >= _LEAST)
    except (TypeError, ValueError, AttributeError):  # they are not a tensor and a matrix
        return False


def compute(args: Args, given: Args, dtype: torch.dtype, *, rounds_inputs: bool) -> Tensor | None:
    """Returns a linear layer's output in ``dtype``; None if it must be computed elsewhere.

    Args:
        args: Input, weight and perhaps bias. Those that are rounded are in ``dtype`` already, or they are
            all as given.
        given: The same before they were cast.
        dtype: The low-precision dtype.
        rounds_inputs: fp32 inputs are rounded first.
    """
    if len(args) < 2 or not is_large(*args[:2]):  # most calls end here: asked first
        return None
    layer = _layer(args, dtype)
    if layer is None:
        return None
    x, weight, bias = layer
    if x.dim() < 2:
        return None
    source = weight  # what the weight of the backward is made from
    if isinstance(given[1], nn.Parameter):
        source = given[1]
    elif weight.dtype is torch.float32:
        return None
    is_wide = bias is not None and bias.dtype is torch.float32
    if rounds_inputs and is_wide and not isinstance(bias, nn.Parameter):
        return None
    kept = None
    if x.dtype is torch.float32:
        x, kept = (CAST[dtype](x), None) if rounds_inputs else (x, CAST[dtype](x.detach()))
    # The source is no input of the function: its gradient is that of the weight that was cast from it.
    rounding = Rounding(dtype, rounds_inputs)
    apply: Callable[..., Tensor] = Linear.apply
    return apply(x, weight, bias, kept, (source,), rounding)


def without_gradients(args: Args, dtype: torch.dtype) -> Tensor | None:
    """Returns a linear layer's output in ``dtype`` without recording gradients; None if computed elsewhere.

    Args:
        args: Input, fp32 weight and perhaps bias, as given.
        dtype: The low-precision dtype.
    """
    low = [each if n == 1 else _cast(each, dtype) for n, each in enumerate(args)]
    layer = _layer(tuple(low), dtype)
    if layer is None or layer[1].dtype is not torch.float32:
        return None
    x, weight, bias = layer
    result = in_one_pass(x, weight, bias, dtype)
    if result is not None or x.dim() < 2:
        return result
    result = in_blocks("linear", (x, weight, bias), dtype)
    return (
        _output(x, weight, bias, Rounding(dtype, rounds_inputs=True)) if result is None else result
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Returns a tensor that may be cast in ``dtype``, row by row; anything else as it is."""
    is_tensor = isinstance(value, Tensor) and value.dtype in ELIGIBLE
    return _contiguous(CAST[dtype](value)) if is_tensor else value


def _layer(args: Args, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Returns input, weight and bias, if torch would make one product of them on the CPU."""
    if not 2 <= len(args) <= 3:
        return None
    x, weight, bias = (*args, None)[:3]
    for tensor in (x, weight) if bias is None else (x, weight, bias):
        if not isinstance(tensor, Tensor) or not (tensor.is_cpu and tensor.is_contiguous()):
            return None
        if tensor.dtype is not dtype and tensor.dtype is not torch.float32:
            return None
    if not x.dim() or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        return None
    if bias is not None and bias.shape != weight.shape[:1]:
        return None
    return None if has_tangents() or _is_watched() else (x, weight, bias)


class Linear(torch.autograd.Function):
    """x @ weight.T + bias."""

    drawn_as = "linear"

    @staticmethod
    def forward(  # noqa: PLR0917  # there are no keywords
        ctx: Any,
        x: Tensor,  # [..., k]: low, unless fp32 inputs are not rounded
        weight: Tensor,  # [n, k]: low, or a parameter
        bias: Tensor | None,  # [n]: likewise
        kept: Tensor | None,  # for the backward, instead of an fp32 x
        sources: tuple[Tensor],  # what the backward rounds instead of keeping the weight
        rounding: Rounding,
    ) -> Tensor:
        """Returns the output in low precision: [..., n]."""
        ctx.save_for_backward(x if kept is None else kept, *sources)
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.rounding = rounding
        return _output(x, weight, bias, rounding)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of `forward`'s inputs."""
        x, source = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.dtypes
        rounding: Rounding = ctx.rounding
        x_learns, weight_learns, bias_learns, *_ = ctx.needs_input_grad
        is_seen = torch.is_grad_enabled() or is_batch(gradient) or _is_watched()
        memory = New() if is_seen else Temporaries(gradient.device)
        n, k = source.shape
        is_plain = gradient.is_contiguous()
        wide = _reshape(memory.widen(gradient) if is_plain else widen(gradient), (-1, n))
        found: list[Tensor | None] = [None, None, None]
        if x_learns:
            if source.dtype is of_weight:  # as it was given to the forward
                weight = rounding.raised(source, memory)
            else:
                weight = memory.rounded(source, of_weight)
            found[0] = _reshape(_product(memory, wide, weight, of_x, rounding), x.shape)
        if weight_learns:
            rows = _reshape(memory.raised(x), (-1, k))
            found[1] = _product(memory, _t(wide), rows, of_weight, rounding)
        if bias_learns:
            found[2] = rounding.gradient(_sum(wide, 0), of_bias, memory)
        memory.free()
        return *found, None, None, None


def _output(x: Tensor, weight: Tensor, bias: Tensor | None, rounding: Rounding) -> Tensor:
    memory = Temporaries(x.device)
    n, k = weight.shape
    rows = _reshape(memory.raised(x), (-1, k))
    columns = _t(rounding.raised(weight, memory))
    product = memory.empty((rows.shape[0], n), (n, 1))
    if bias is None:
        _mm(rows, columns, out=product)
    else:
        _addmm(rounding.raised(bias, memory), rows, columns, out=product)
    # Not a view of what is cast: autograd refuses to write to views that were made without it.
    result = CAST[rounding.dtype](_reshape(product, (*x.shape[:-1], n)))
    memory.free()
    return result


def _product(
    memory: Temporaries | New, a: Tensor, b: Tensor, dtype: torch.dtype, rounding: Rounding
) -> Tensor:
    """Returns a @ b, a gradient of an input of ``dtype``."""
    if dtype is torch.float32:
        return rounding.gradient(_mm(a, b), dtype, memory)
    return CAST[dtype](memory.mm(a, b))


def _is_watched() -> bool:
    """Whether a mode may keep the tensors it sees, or a transform has tensors of its own."""
    return bool(dispatch_modes()) or transforms() is not None
