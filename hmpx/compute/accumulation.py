"""Ops with an ``accumulate_dtype`` or ``output_dtype``: computed in a wider dtype, and cast once.

The inputs are already rounded. They are upcast to the accumulate dtype, the op runs, and its floating-point
outputs are cast to the output dtype; gradients are those of these casts. If torch has a kernel that does
exactly this, that kernel runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from ..tensors import CAST, ELIGIBLE, LOW_DTYPES, Args, Kwargs
from ..torch_internals import (
    has_fake_tensors,
    has_tangents,
    hooks_refused,
    is_jit_tracing,
    run_when_traced,
    transforms,
)
from . import capabilities
from .capabilities import PRODUCTS
from .composition import (
    Inputs,
    are_casts_kept,
    call_raised,
    in_graph,
    is_exported,
    is_traced,
    round_fp32,
    rounded,
    widen,
    widen_matrices,
)
from .saved_tensors import Precision, keeping_low


def _keeps_sums_fp32(dtype: torch.dtype) -> bool:
    flags = torch.backends.cuda.matmul
    if dtype is torch.bfloat16:
        return not flags.allow_bf16_reduced_precision_reduction
    return not (flags.allow_fp16_accumulation or flags.allow_fp16_reduced_precision_reduction)


run_when_traced(_keeps_sums_fp32)


@dataclass(frozen=True, slots=True)
class Accumulation:
    """Computes one op in its accumulate dtype, and casts the result."""

    op: str
    kind: str  # one of `capability.KINDS`
    casts_first: bool  # it has ``dtype=``, and its kernel casts the input to that before computing
    accumulate_dtype: torch.dtype | None  # None leaves the computation to the op's kernel
    output_dtype: torch.dtype | None  # None for the dtype of the inputs

    def compute(  # noqa: PLR0917  # all there is to one call
        self,
        function: Callable[..., Any],
        inputs: Inputs,
        args: Args,
        kwargs: Kwargs,
        given: Args,
        dtype: torch.dtype,
    ) -> Any:
        """Returns the call's result.

        ``given`` are the positional arguments before casts; ``dtype`` is that of the inputs, except a norm's
        fp32 parameters.
        """
        if self.accumulate_dtype is None:
            result = function(*args, **kwargs)
            return rounded(result, CAST[self.output_dtype or dtype], dtype)
        output = self.output_dtype or dtype
        if self._has_native_kernel(inputs, output, dtype):
            return function(*args, **kwargs)
        if self._gives_fp32(inputs, dtype):
            product = _by_kernel(self.op, args, kwargs, output)
            if product is not None:
                return product
        if is_traced() and not is_exported():
            return in_graph(function, args, kwargs, output, self.accumulate_dtype)
        # A positional None may be dtype.
        names_dtype = "dtype" in kwargs or type(None) in map(type, args)
        # A low dtype is that of the rounded result: see `rounding_last`.
        if self.casts_first and not names_dtype and self.accumulate_dtype not in LOW_DTYPES:
            result = function(*args, **kwargs, dtype=self.accumulate_dtype)
            return rounded(result, CAST[output], self.accumulate_dtype)
        if self._keeps_low(inputs, output, dtype):
            raise_one = widen_matrices if self.kind == "gemm" else widen
            is_product = self.kind in PRODUCTS
            precision = Precision(dtype, raise_one, is_product, rounds_inputs=True)
            finish = CAST[output] if is_product else None
            return keeping_low(function, args, kwargs, given, precision, finish)
        result = call_raised(function, args, kwargs, CAST[self.accumulate_dtype], ELIGIBLE)
        return rounded(result, CAST[output], self.accumulate_dtype)

    def _has_native_kernel(self, inputs: Inputs, output: torch.dtype, dtype: torch.dtype) -> bool:
        """Whether the op's kernel for ``dtype`` accumulates this way, and rounds once."""
        if self.accumulate_dtype is dtype:
            return output is dtype
        if inputs.first.device.type != "cuda" or self.kind != "gemm" or output is not dtype:
            return False
        if self.accumulate_dtype is not torch.float32 or dtype not in LOW_DTYPES:
            return False
        return _keeps_sums_fp32(dtype)

    def _gives_fp32(self, inputs: Inputs, dtype: torch.dtype) -> bool:
        return (
            self.accumulate_dtype is torch.float32
            and self.kind == "gemm"
            and has_kernel(inputs.first.device, dtype)
            and (inputs.is_plain or has_fake_tensors())
            and transforms() is None
            and not is_exported()
        )

    def _keeps_low(self, inputs: Inputs, output: torch.dtype, dtype: torch.dtype) -> bool:
        """Whether autograd can do without the upcast inputs."""
        keeps_inputs = self.kind in PRODUCTS or (self.kind == "norm" and output is dtype)
        return (
            self.accumulate_dtype is torch.float32
            and dtype in LOW_DTYPES
            and keeps_inputs
            and inputs.is_learning
            and inputs.is_plain
            and transforms() is None
            and not is_jit_tracing()
            and hooks_refused() is None
        )


# Read before anything is patched: op lists may name any of them.
_mm, _bmm, _matmul, _sum = torch.mm, torch.bmm, torch.matmul, torch.sum
_add, _add_, _expand, _flatten = torch.add, Tensor.add_, Tensor.expand, Tensor.flatten
_reshape, _squeeze = Tensor.reshape, Tensor.squeeze
_transpose, _unsqueeze = Tensor.transpose, Tensor.unsqueeze

_broadcast: Callable[..., torch.Size] = torch.broadcast_shapes


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether ``device`` multiplies matrices of ``dtype`` and returns the sums in fp32."""
    if device.type != "cuda" or torch.version.hip is not None or dtype not in LOW_DTYPES:
        return False
    if dtype is torch.float16 and torch.backends.cuda.matmul.allow_fp16_accumulation:
        return False  # these kernels reject it
    return capabilities.reported(capabilities.name_of(device), dtype) is not False


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


def _by_kernel(op: str, args: Args, kwargs: Kwargs, output: torch.dtype) -> Tensor | None:
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


class _AccumulatedProduct(torch.autograd.Function):
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


def _product(
    a: Tensor, b: Tensor, c: Tensor | None, output: torch.dtype, is_transposed: bool = False
) -> Tensor:
    is_low = a.dtype is b.dtype and a.dtype in LOW_DTYPES
    if is_low and transforms() is None and not has_tangents():
        return _AccumulatedProduct.apply(a, b, c, output, is_transposed)  # type: ignore[no-any-return, no-untyped-call]
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
