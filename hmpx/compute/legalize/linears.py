"""Legalized linear layers and products with weights, in reused fp32 memory.

In training: the same products as torch's for a linear layer and its backward, with the rounding points of
`wrappers.legalized`, so results are bit-identical. In inference the weights are upcast block by block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from ...tensors import CAST, ELIGIBLE, Args
from ...torch_internals import has_tangents
from ..composition import widen
from .scratch import (
    New,
    Rounding,
    Temporaries,
    is_seen,
    kernels_for,
    memory_for,
    round_in_one_pass,
)

# Read before anything is patched: op lists may name any of them.
_add_, _as_strided, _contiguous = Tensor.add_, Tensor.as_strided, Tensor.contiguous
_copy_, _narrow, _new_empty, _numel = Tensor.copy_, Tensor.narrow, Tensor.new_empty, Tensor.numel
_reshape, _t, _unsqueeze = Tensor.reshape, Tensor.t, Tensor.unsqueeze
_addmm, _mm, _sum = torch.addmm, torch.mm, torch.sum

#: Elements of the input or the output; below this, fresh memory costs less than `compute`'s bookkeeping.
LEAST: Final = 1 << 17

#: Ops that multiply by a weight matrix -> the counts of arguments that `in_blocks` supports.
BLOCKED: Final = {"addmm": (3,), "linear": (2, 3), "matmul": (2,), "mm": (2,)}
_BLOCK_BYTES = 2 << 20  # of fp32: the size of a core's second-level cache
_MOST_ROWS = 512  # beyond this, arithmetic hides the casts
FEW_ROWS: Final = 2  # with so few, reading the weights dominates
_LEAST_WEIGHTS = 1 << 14
_LEAST_WIDE = 1 << 17


def is_large_weight(weight: Tensor) -> bool:
    """Whether rounding an fp32 weight in parts costs less than casting the whole."""
    return weight.is_cpu and _numel(weight) >= _LEAST_WIDE


def is_read_once(weight: Any, dtype: torch.dtype) -> bool:
    """Whether a linear layer rounds a weight while it multiplies it by `FEW_ROWS` or fewer."""
    is_wide = type(weight) is nn.Parameter and weight.dtype is torch.float32
    return is_wide and is_large_weight(weight) and kernels_for(weight, dtype) is not None


# --- in training -----------------------------------------------------------------------------------


def compute(args: Args, given: Args, dtype: torch.dtype, *, rounds_inputs: bool) -> Tensor | None:
    """Returns the output of a large linear layer, see `LEAST`, in ``dtype``; None if unsupported.

    Of ``args`` (input, weight and perhaps bias; before casts ``given``), those to round are already in
    ``dtype``, or all are uncast. With ``rounds_inputs`` fp32 inputs are rounded first.
    """
    layer = _layer(args, dtype)
    if layer is None:
        return None
    x, weight, bias = layer
    if x.dim() < 2:
        return None
    source = weight  # the source of the backward's weight
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
    # The source is not an input of the function: its gradient flows through the weight's cast.
    rounding = Rounding(dtype, rounds_inputs)
    apply: Callable[..., Tensor] = _Linear.apply
    return apply(x, weight, bias, kept, (source,), rounding)


def _layer(args: Args, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Returns input, weight and bias, if torch would compute one product on the CPU."""
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
    return None if has_tangents() or is_seen() else (x, weight, bias)


class _Linear(torch.autograd.Function):
    """x @ weight.T + bias."""

    drawn_as = "linear"

    @staticmethod
    def forward(  # noqa: PLR0917  # there are no keywords
        ctx: Any,
        x: Tensor,  # [..., k]: low, unless fp32 inputs are not rounded
        weight: Tensor,  # [n, k]: low, or a parameter
        bias: Tensor | None,  # [n]: likewise
        kept: Tensor | None,  # for the backward, instead of an fp32 x
        sources: tuple[Tensor],  # rounded in the backward, instead of keeping the weight
        rounding: Rounding,
    ) -> Tensor:
        ctx.save_for_backward(x if kept is None else kept, *sources)
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.rounding = rounding
        return _output(x, weight, bias, rounding)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, source = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.dtypes
        rounding: Rounding = ctx.rounding
        x_learns, weight_learns, bias_learns, *_ = ctx.needs_input_grad
        memory = memory_for(gradient)
        n, k = source.shape
        is_plain = gradient.is_contiguous()
        wide = _reshape(memory.widen(gradient) if is_plain else widen(gradient), (-1, n))
        found: list[Tensor | None] = [None, None, None]
        if x_learns:
            if source.dtype is of_weight:  # the dtype of the forward's input
                weight = rounding.raised(source, memory)
            else:
                weight = memory.rounded(source, of_weight)
            found[0] = _reshape(_product(memory, wide, weight, of_x, rounding), x.shape)
        if weight_learns:
            rows = _reshape(_raised(x, memory), (-1, k))
            found[1] = _product(memory, _t(wide), rows, of_weight, rounding)
        if bias_learns:
            found[2] = rounding.gradient(_sum(wide, 0), of_bias, memory)
        memory.free()
        return *found, None, None, None


def _output(x: Tensor, weight: Tensor, bias: Tensor | None, rounding: Rounding) -> Tensor:
    memory = Temporaries(x.device)
    n, k = weight.shape
    rows = _reshape(_raised(x, memory), (-1, k))
    columns = _t(rounding.raised(weight, memory))
    product = memory.empty((rows.shape[0], n), (n, 1))
    if bias is None:
        _mm(rows, columns, out=product)
    else:
        _addmm(rounding.raised(bias, memory), rows, columns, out=product)
    # Not a view of the cast result: autograd refuses writes to views made without it.
    result = CAST[rounding.dtype](_reshape(product, (*x.shape[:-1], n)))
    memory.free()
    return result


def _raised(tensor: Tensor, memory: New) -> Tensor:
    return tensor if tensor.dtype is torch.float32 else memory.widen(tensor)


def _product(memory: New, a: Tensor, b: Tensor, dtype: torch.dtype, rounding: Rounding) -> Tensor:
    if dtype is torch.float32:
        return rounding.gradient(_mm(a, b), dtype, memory)
    return CAST[dtype](memory.mm(a, b))


# --- in inference ----------------------------------------------------------------------------------


def without_gradients(args: Args, dtype: torch.dtype) -> Tensor | None:
    """Returns the output of a linear layer with an uncast fp32 weight; None if unsupported."""
    low = [each if n == 1 else _cast(each, dtype) for n, each in enumerate(args)]
    layer = _layer(tuple(low), dtype)
    if layer is None or layer[1].dtype is not torch.float32:
        return None
    x, weight, bias = layer
    result = _in_one_pass(x, weight, bias, dtype)
    if result is None and x.dim() > 1:
        result = in_blocks("linear", (x, weight, bias), dtype)
        if result is None:
            result = _output(x, weight, bias, Rounding(dtype, rounds_inputs=True))
    return result


def _cast(value: Any, dtype: torch.dtype) -> Any:
    is_tensor = isinstance(value, Tensor) and value.dtype in ELIGIBLE
    return _contiguous(CAST[dtype](value)) if is_tensor else value


def _in_one_pass(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """Returns the output for one or two rows, with the fp32 weight rounded as it is read; else None."""
    is_short = 0 < _numel(x) <= FEW_ROWS * x.shape[-1]
    kernels = kernels_for(weight, dtype) if is_short else None
    if kernels is None:
        return None
    product = _new_empty(weight, (*x.shape[:-1], weight.shape[0]))
    kernels.multiply(widen(x), weight, product)
    if bias is not None:
        _add_(product, widen(bias))
    return CAST[dtype](product)


def in_blocks(op: str, args: Args, dtype: torch.dtype) -> Tensor | None:
    """Returns a product whose weights are converted to fp32 block by block; None if unsupported.

    Weights in ``dtype`` are upcast; those of a linear layer may be fp32, and are rounded.

    With few rows, reading the weights dominates: a block stays in the cache. The transposed product is faster,
    except for few rows with weights of [k, n], as in most calls of ``matmul``: there it is much slower.
    """
    bias: Tensor | None = None
    if has_tangents() or len(args) not in BLOCKED[op]:
        return None
    if op == "linear":
        x, weight, bias = (*args, None)[:3]  # x: [..., k], weight: [n, k]
    elif op == "addmm":
        bias, x, weight = args
    else:
        x, weight = args
    if not (isinstance(x, Tensor) and x.is_cpu and isinstance(weight, Tensor)) or weight.dim() != 2:
        return None
    if op != "linear":
        weight = _t(weight)
    if weight.numel() < _LEAST_WEIGHTS or x.dim() < 2 or x.numel() > _MOST_ROWS * x.shape[-1]:
        return None
    if bias is not None and not (isinstance(bias, Tensor) and bias.dim() == 1):
        return None
    n, k = weight.shape
    is_wide = weight.dtype is torch.float32 and op == "linear" and weight.is_contiguous()
    if x.shape[-1] != k or not (weight.dtype is dtype or is_wide) or not x.numel():
        return None
    rows = x.numel() // k
    size = min(n, max(1, _BLOCK_BYTES // (4 * k)))  # rows of the weight in a block
    is_by_column = weight.stride(0) < weight.stride(1)
    memory = Temporaries(x.device)
    wide = memory.empty((rows, k), (k, 1))
    _copy_(_reshape(wide, x.shape), x)
    columns = _t(wide)
    if is_by_column:
        product = _t(memory.empty((rows, n), (n, 1)))
    else:
        product = memory.empty((n, rows), (rows, 1))
    values = memory.empty((size * k,), (1,))
    for start in range(0, n, size):
        length = min(size, n - start)
        strides = (1, length) if is_by_column else (k, 1)
        block = _as_strided(values, (length, k), strides)
        part, target = _narrow(weight, 0, start, length), _narrow(product, 0, start, length)
        if not (is_wide and round_in_one_pass(part, block, dtype)):
            _copy_(block, CAST[dtype](part))
        if is_by_column:
            _mm(_t(columns), _t(block), out=_t(target))
        else:
            _mm(block, columns, out=target)
    result = _finished(product, bias, x, dtype)
    memory.free()
    return result


def _finished(product: Tensor, bias: Tensor | None, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the transpose of a product, with the bias, in ``dtype`` and with the dimensions of ``x``."""
    if bias is not None:
        _add_(product, _unsqueeze(widen(CAST[dtype](bias)), 1))
    shape, by_row = (*x.shape[:-1], product.shape[0]), _t(product)
    # Not a view: autograd refuses writes to views made without it.
    if by_row.is_contiguous():
        return CAST[dtype](_reshape(by_row, shape))
    result = _new_empty(x, shape, dtype=dtype)
    # A copy to another layout is fast only within one dtype.
    _copy_(_reshape(result, by_row.shape), _t(CAST[dtype](product)))
    return result
