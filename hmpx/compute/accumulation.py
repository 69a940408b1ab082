"""Ops with an ``accumulate_dtype`` or ``output_dtype``: computed in a wider dtype, and cast once.

The inputs are already rounded. They are upcast to the accumulate dtype, the op runs, and its floating-point
outputs are cast to the output dtype; gradients are those of these casts. If torch has a kernel that does
exactly this, that kernel runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from ..tensors import CAST, ELIGIBLE, LOW_DTYPES, Args, Kwargs
from ..torch_internals import (
    has_fake_tensors,
    hooks_refused,
    is_jit_tracing,
    run_when_traced,
    transforms,
)
from . import products
from .composition import Inputs, call_raised, rounded, widen, widen_matrices
from .graphs import in_graph, is_exported, is_traced
from .legalize.capability import PRODUCTS
from .saved_tensors import Precision, keeping_low

_REDUCED_REDUCTION: Final = {
    torch.bfloat16: "allow_bf16_reduced_precision_reduction",
    torch.float16: "allow_fp16_reduced_precision_reduction",
}


def _keeps_sums_fp32(dtype: torch.dtype) -> bool:
    """Whether CUDA's products of ``dtype`` accumulate entirely in fp32, by torch's settings."""
    flags = torch.backends.cuda.matmul
    if dtype is torch.float16 and flags.allow_fp16_accumulation:
        return False
    return not getattr(flags, _REDUCED_REDUCTION[dtype])


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

        Args:
            function: torch's function.
            inputs: Facts about the floating-point inputs among the arguments.
            args: Positional arguments.
            kwargs: Keyword arguments.
            given: The positional arguments before they were cast.
            dtype: The dtype of the inputs, except a norm's fp32 parameters.
        """
        if self.accumulate_dtype is None:
            result = function(*args, **kwargs)
            return rounded(result, CAST[self.output_dtype or dtype], dtype)
        output = self.output_dtype or dtype
        if self._has_native_kernel(inputs, output, dtype):
            return function(*args, **kwargs)
        if self._gives_fp32(inputs, dtype):
            product = products.compute(self.op, args, kwargs, output)
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
        if self.accumulate_dtype is not torch.float32 or dtype not in _REDUCED_REDUCTION:
            return False
        return _keeps_sums_fp32(dtype)

    def _gives_fp32(self, inputs: Inputs, dtype: torch.dtype) -> bool:
        """Whether the device's kernels can return products of ``dtype`` in fp32."""
        return (
            self.accumulate_dtype is torch.float32
            and self.kind == "gemm"
            and products.has_kernel(inputs.first.device, dtype)
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
