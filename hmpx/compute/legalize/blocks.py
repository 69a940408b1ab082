"""Products with weights in low precision, without gradients: upcast to fp32 block by block.

Independent of which products are computed this way, and why.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from ...tensors import CAST, Args
from ...torch_internals import has_tangents
from ..composition import widen
from .scratch import Temporaries, has_kernels, multiplied_in_one_pass, round_in_one_pass

# Taken before anything is patched: op lists may name any of them.
_add_, _as_strided, _copy_ = Tensor.add_, Tensor.as_strided, Tensor.copy_
_mm, _narrow, _new_empty, _numel, _reshape, _t, _unsqueeze = (
    torch.mm,
    Tensor.narrow,
    Tensor.new_empty,
    Tensor.numel,
    Tensor.reshape,
    Tensor.t,
    Tensor.unsqueeze,
)

#: Ops that multiply by a weight matrix -> the numbers of arguments that `in_blocks` takes.
BLOCKED: Final = {"addmm": (3,), "linear": (2, 3), "matmul": (2,), "mm": (2,)}
_BLOCK_BYTES = 2 << 20  # of fp32: what a core's second-level cache holds
_MOST_ROWS = 512  # beyond this, arithmetic hides the casts
FEW_ROWS: Final = 2  # for which weights are read rather than multiplied
_LEAST_WEIGHTS = 1 << 14
_LEAST_WIDE = 1 << 17


def is_large(weight: Tensor) -> bool:
    """Whether rounding the parts of an fp32 weight costs less than casting it as a whole."""
    return weight.is_cpu and _numel(weight) >= _LEAST_WIDE


def is_read_once(weight: Any, dtype: torch.dtype) -> bool:
    """Whether `in_one_pass` rounds a weight while it multiplies it by `FEW_ROWS` or fewer."""
    is_wide = type(weight) is nn.Parameter and weight.dtype is torch.float32
    return is_wide and is_large(weight) and has_kernels(weight, dtype)


def in_one_pass(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """Returns a linear layer's output in ``dtype`` for one or two rows; None for more, and without kernels.

    Args:
        x: [..., k]: in ``dtype``. As the others, it is contiguous.
        weight: [n, k]: fp32; rounded as it is read.
        bias: [n]: in ``dtype``.
        dtype: The low-precision dtype.
    """
    if not 0 < _numel(x) <= FEW_ROWS * x.shape[-1]:
        return None
    product = multiplied_in_one_pass(widen(x), weight, dtype)
    if product is None:
        return None
    if bias is not None:
        _add_(product, widen(bias))
    return CAST[dtype](product)


def in_blocks(op: str, args: Args, dtype: torch.dtype) -> Tensor | None:
    """Returns a product whose weights are made fp32 block by block; None if it does not qualify.

    Weights in ``dtype`` are upcast; those of a linear layer may be fp32, and are rounded.

    With few rows, the time goes into reading the weights. Upcast as a whole, the weights are written
    to memory and read again, four bytes each; a block stays in the cache. The transposed product is
    the faster one, but for few rows with weights of [k, n], as those of ``matmul`` are mostly: there it is much
    the slower one. This holds for CPUs: other devices are faster with few kernels on much memory.
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
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    if not x.is_cpu:
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
    wide = _copy_(memory.empty(x.shape, _contiguous_strides(x.shape)), x)
    columns = _as_strided(wide, (k, rows), (1, k))
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
    """Returns the transpose of a product, with the bias, in ``dtype`` and as many dimensions as ``x``."""
    if bias is not None:
        _add_(product, _unsqueeze(widen(CAST[dtype](bias)), 1))
    shape, by_row = (*x.shape[:-1], product.shape[0]), _t(product)
    # What is returned is no view: autograd refuses to write to those that were made without it.
    if by_row.is_contiguous():
        return CAST[dtype](_reshape(by_row, shape))
    result = _new_empty(x, shape, dtype=dtype)
    # A copy to another layout is fast only within one dtype.
    _copy_(_reshape(result, by_row.shape), _t(CAST[dtype](product)))
    return result


def _contiguous_strides(shape: torch.Size) -> list[int]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return strides[::-1]
