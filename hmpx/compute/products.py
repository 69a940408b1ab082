"""Products of low-precision matrices accumulated in fp32, by CUDA kernels that return fp32.

torch has these kernels (``out_dtype=``) for `torch.mm` and `torch.bmm`, without gradients. This adds the
gradients of casts, and supports the other products of two matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from ..tensors import CAST, LOW_DTYPES, Args, Kwargs
from ..torch_internals import run_when_traced, transforms
from .composition import widen
from .graphs import are_casts_kept, is_traced, round_fp32
from .legalize import capability

# Read before anything is patched: op lists may name any of them.
_mm, _bmm, _matmul, _sum = torch.mm, torch.bmm, torch.matmul, torch.sum
_add, _add_, _expand, _flatten = torch.add, Tensor.add_, Tensor.expand, Tensor.flatten
_reshape, _squeeze, _transpose, _unsqueeze = (
    Tensor.reshape,
    Tensor.squeeze,
    Tensor.transpose,
    Tensor.unsqueeze,
)

_broadcast: Callable[..., torch.Size] = torch.broadcast_shapes


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether ``device`` multiplies matrices of ``dtype`` and returns the sums in fp32."""
    if device.type != "cuda" or torch.version.hip is not None or dtype not in LOW_DTYPES:
        return False
    if dtype is torch.float16 and torch.backends.cuda.matmul.allow_fp16_accumulation:
        return False  # these kernels reject it
    return capability.reported(capability.name_of(device), dtype) is not False


run_when_traced(has_kernel)


#: Op -> the names of its tensors, and its factors' numbers of dimensions; None for any.
_FORMS: Final[Mapping[str, tuple[tuple[str, ...], tuple[int, int] | None]]] = {
    "addmm": (("input", "mat1", "mat2"), (2, 2)),
    "baddbmm": (("input", "batch1", "batch2"), (3, 3)),
    "bmm": (("input", "mat2"), (3, 3)),
    "dot": (("input", "tensor"), (1, 1)),
    "linear": (("input", "weight", "bias"), None),
    "matmul": (("input", "other"), None),
    "mm": (("input", "mat2"), (2, 2)),
    "mv": (("input", "vec"), (2, 1)),
    "rmatmul": (("input", "other"), None),
}


def compute(op: str, args: Args, kwargs: Kwargs, output: torch.dtype) -> Tensor | None:
    """Computes product ``op``, accumulated in fp32 and rounded once to ``output``; None if unsupported.

    Its gradients are those of casts to fp32 and then to ``output``.
    """
    if op not in _FORMS:
        return None
    names, dims = _FORMS[op]
    given = [*args, *[kwargs[name] for name in names[len(args) :] if name in kwargs]]
    if len(given) != len(args) + len(kwargs):
        return None  # such as a factor
    if len(given) == 3 and op == "linear" and given[2] is None:
        given.pop()
    if not all([isinstance(value, Tensor) for value in given]):  # noqa: C419  # Dynamo traces lists better
        return None
    dtype = given[0].dtype
    if dtype not in LOW_DTYPES or any([value.dtype is not dtype for value in given]):  # noqa: C419
        return None
    if op == "linear":
        return _linear(output, *given)
    if len(given) != len(names):
        return None
    a, b = given[-2:]
    if op == "rmatmul":
        a, b = b, a
    if dims is None:
        return _pair(output, a, b)
    if (a.dim(), b.dim()) != dims:
        return None
    if len(given) == 2:
        return _pair(output, a, b)
    return _product(a, b, given[0], output) if given[0].dim() <= dims[0] else None


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Returns a @ b in fp32: [..., n, k] @ [..., k, m] -> [..., n, m], in one low-precision dtype."""
    if a.dim() == b.dim() == 2:
        return _mm(a, b, out_dtype=torch.float32)
    if a.dim() == b.dim() == 3 and a.shape[0] == b.shape[0]:
        return _bmm(a, b, out_dtype=torch.float32)
    batch = _broadcast(a.shape[:-2], b.shape[:-2])
    count, n, m = math.prod(batch), a.shape[-2], b.shape[-1]
    a = _reshape(_expand(a, *batch, -1, -1), (count, n, a.shape[-1]))
    b = _reshape(_expand(b, *batch, -1, -1), (count, b.shape[-2], m))
    return _reshape(_bmm(a, b, out_dtype=torch.float32), (*batch, n, m))


# --- gradients -----------------------------------------------------------------------------------


class _Product(torch.autograd.Function):
    """a @ b + c for matrices in low precision, or stacks of them; accumulated in fp32, rounded once.

    If ``is_transposed``, b is the transposed view of a matrix, and so is its gradient.
    """

    drawn_as = "matmul"

    @staticmethod
    def forward(
        a: Tensor, b: Tensor, c: Tensor | None, output: torch.dtype, is_transposed: bool
    ) -> Tensor:
        result = multiply(a, b)
        return _rounded(result if c is None else _add_(result, c), output)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, c, ctx.output, ctx.is_transposed = inputs
        ctx.save_for_backward(a, b)
        ctx.save_for_forward(a, b)
        ctx.addend = None if c is None else (c.dtype, c.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        needs_a, needs_b, needs_c, *_ = ctx.needs_input_grad
        return (
            _factor(gradient, _transpose(b, -2, -1), a) if needs_a else None,
            (_second(a, gradient, b, ctx.is_transposed) if needs_b else None),
            _summed(gradient, *ctx.addend) if needs_c else None,
            None,
            None,
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        (a, b), (a_tangent, b_tangent, c_tangent, *_) = ctx.saved_tensors, tangents
        terms = [] if c_tangent is None else [widen(c_tangent)]
        if a_tangent is not None:
            terms.append(_matmul(widen(a_tangent), widen(b)))
        if b_tangent is not None:
            terms.append(_matmul(widen(a), widen(b_tangent)))
        result = terms.pop()
        while terms:
            result = _add(result, terms.pop())
        return CAST[ctx.output](result)


def _product(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    output: torch.dtype,
    is_transposed: bool = False,
) -> Tensor:
    """Returns a @ b + c for matrices, accumulated in fp32 and rounded once; see `_Product`."""
    if a.dtype is b.dtype and a.dtype in LOW_DTYPES and transforms() is None:
        return _Product.apply(a, b, c, output, is_transposed)  # type: ignore[no-any-return, no-untyped-call]
    result = _matmul(widen(a), widen(b))
    return _rounded(result if c is None else _add(result, widen(c)), output)


def _second(a: Tensor, gradient: Tensor, b: Tensor, is_transposed: bool) -> Tensor:
    """Returns the gradient of b in a @ b, laid out like b."""
    if is_transposed:
        transposed = _factor(_transpose(gradient, -2, -1), a, _transpose(b, -2, -1))
        return _transpose(transposed, -2, -1)
    return _factor(_transpose(a, -2, -1), gradient, b)


def _factor(a: Tensor, b: Tensor, factor: Tensor) -> Tensor:
    """Returns a @ b in the dtype of ``factor``, summed over its broadcast dimensions."""
    if _broadcast(a.shape[:-2], b.shape[:-2]) == factor.shape[:-2]:
        return _product(a, b, None, factor.dtype)
    return _summed(_product(a, b, None, torch.float32), factor.dtype, factor.shape)


def _summed(gradient: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """Returns the gradient of a tensor that was broadcast from ``shape``, summed in fp32."""
    extra = gradient.dim() - len(shape)
    aligned = [1] * extra + list(shape)
    dims = [d for d, (n, m) in enumerate(zip(aligned, gradient.shape, strict=True)) if n != m]
    dims = [*range(extra), *[d for d in dims if d >= extra]]
    if not dims:
        return CAST[dtype](gradient)
    total = _sum(gradient, dims, keepdim=True, dtype=torch.float32)
    return _rounded(_reshape(total, shape), dtype)


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts fp32 to ``dtype``, even if a compiler elides round-trip casts."""
    if dtype in LOW_DTYPES and is_traced() and not are_casts_kept():
        tensor = round_fp32(tensor, dtype)
    return CAST[dtype](tensor)


# --- shapes --------------------------------------------------------------------------------------


def _pair(output: torch.dtype, a: Tensor, b: Tensor) -> Tensor | None:
    """Returns the product as `torch.matmul` defines it: [..., n, k] @ [..., k, m] -> [..., n, m]."""
    if not a.dim() or not b.dim():
        return None
    is_row, is_column = a.dim() == 1, b.dim() == 1
    if is_row:
        a = _unsqueeze(a, 0)
    if is_column:
        b = _unsqueeze(b, 1)
    if b.dim() == 2 and a.dim() > 2:
        result = _product(_flatten(a, 0, -2), b, None, output)
        result = _reshape(result, (*a.shape[:-1], b.shape[-1]))
    else:
        result = _product(a, b, None, output)
    if is_column:
        result = _squeeze(result, -1)
    return _squeeze(result, -1 if is_column else -2) if is_row else result


def _linear(
    output: torch.dtype, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor | None:
    """Returns x @ weight.T + bias: [..., k], [m, k], [m] -> [..., m]."""
    if weight.dim() != 2 or not x.dim() or (bias is not None and bias.dim() != 1):
        return None
    rows = _flatten(x, 0, -2) if x.dim() > 1 else _unsqueeze(x, 0)
    result = _product(rows, _transpose(weight, 0, 1), bias, output, True)
    return _reshape(result, (*x.shape[:-1], weight.shape[0])) if x.dim() != 2 else result
