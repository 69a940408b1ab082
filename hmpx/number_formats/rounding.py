"""Rounding tensors to one format in one way: the routes by which that is done.

Plans are run by compiled kernels on the CPU, else by torch ops, for any floating dtype, strides and
device. Autograd is for `quantization`.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from torch import Tensor

from ..errors import OptionError
from ..tensors import CAST, PLAIN_TENSORS, SPARSE, is_in_memory
from ..torch_internals import (
    dispatch_modes,
    is_batch,
    is_gradient_batch,
    jit_tracing_state,
    one_of_batch,
    run_when_traced,
    transforms,
)
from . import graph_op
from .bits import FP32, FP64
from .families import PLANS, Format, Rounder
from .kernels import calls
from .kernels import library as kernel_library
from .keys import draw_keys, traced_keys
from .layouts import NO_GRID, Grid, Layout
from .plans import Plan
from .torch_rounding import (
    NO_KEYS,
    as_laid_out,
    by_traceable_ops,
    round_in_parts,
    rounded_rows,
    signed,
)
from .unpatched import CONTIGUOUS, EMPTY_LIKE

#: Torch runs smaller work on one thread, too.
THREADED: Final = 32768


class Rounding:
    """Rounds to one format in one way; plans and kernels are made once for each dtype."""

    __slots__ = ("_by_dtype", "encoders", "format", "mode", "overflow")

    def __init__(self, format: Format, mode: str, overflow: str | None) -> None:
        self.format, self.mode, self.overflow = format, mode, overflow
        self._by_dtype: dict[torch.dtype, DtypeRounding] = {}
        self.encoders: dict[torch.dtype, calls.Encoder | None] = {}

    def __call__(
        self, x: Tensor, generator: torch.Generator | None = None, scale: Tensor | None = None
    ) -> Tensor:
        """Returns ``x`` rounded; records no gradient.

        Args:
            x: As for `quantize`.
            generator: As for `quantize`.
            scale: As for `quantize`.

        Raises:
            OptionError: As for `quantize`.
        """
        if scale is not None:
            self.format.check_scale(scale, x)
        if torch.compiler.is_dynamo_compiling():
            return self._in_dynamo(x, generator, scale)
        step = self._by_dtype.get(x.dtype)
        if step is None:
            step = self.for_dtype(x.dtype)
        if step.plan is None:
            return x if step.function is None else step.function(x)
        if not has_own_memory(x):
            if is_gradient_batch(x):
                return one_of_batch(lambda each: self(each, generator, scale), x)
            if scale is None and graph_op.is_taken(x):
                return self._in_graph(x, generator)
            check_dense(x)
            with torch.no_grad():
                return by_traceable_ops(x, step.plan, step.layout, generator, scale)
        keys = NO_KEYS if self.mode != "stochastic" else draw_keys(generator)
        return rounded(x, step, keys, scale)

    def _in_dynamo(
        self, x: Tensor, generator: torch.Generator | None, scale: Tensor | None
    ) -> Tensor:
        """Returns ``x`` rounded by ops that become part of the graph."""
        function = self.format.own_function
        if function is not None:
            return function(x)
        constants = _constants_of(self.format, self.mode, self.overflow, x.dtype)
        if not constants:
            return x
        if scale is None and graph_op.is_taken(x):
            return self._in_graph(x, generator)
        return by_traceable_ops(x, plan_of(*constants), self.format.layout, generator, scale)

    def _in_graph(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """Returns ``x`` rounded by one op of a graph."""
        text = _text_of(self.format, self.mode, self.overflow, x.dtype)
        keys = traced_keys(x, generator) if self.mode == "stochastic" else None
        found: Tensor = graph_op.OP(x.detach(), text, keys)
        return found

    def for_dtype(self, dtype: torch.dtype) -> DtypeRounding:
        """Returns how tensors of one dtype are rounded.

        Raises:
            OptionError: They can't be.
        """
        step = self._by_dtype.get(dtype)
        if step is None:
            if dtype not in CAST:
                raise OptionError(
                    f"quantize takes tensors of {', '.join(str(known) for known in CAST)}, not {dtype}; "
                    "cast it first"
                )
            format = self.format
            plan = format.plan(dtype, self.mode, self.overflow)  # type: ignore[arg-type]  # checked
            step = DtypeRounding(plan, format.layout, dtype, format.own_function)
            self._by_dtype[dtype] = step
        return step


def rounded(
    x: Tensor, step: DtypeRounding, keys: tuple[int, int], scale: Tensor | None = None
) -> Tensor:
    """Returns ``x``, which has memory of its own, rounded by a kernel, or else by torch ops.

    Args:
        x: On the CPU.
        step: How; with a plan.
        keys: Of the noise.
        scale: As for `quantize`.
    """
    if not is_in_memory(x):
        x = EMPTY_LIKE(x).copy_(x.detach())
    kernel = step.kernel or step.find_kernel()
    given = () if scale is None else step.given(scale)
    if kernel is None or given is None:
        with torch.no_grad():
            return _by_ops(x, step, keys, scale)
    if step.is_native and x.is_contiguous():
        grid = step.grid(x)
        result, count = EMPTY_LIKE(x), x.numel()
        if count:
            threads = 1 if count < THREADED else torch.get_num_threads()
            kernel(x.data_ptr(), result.data_ptr(), count, *keys, threads, grid, *given)
        return result
    with torch.no_grad():
        return _laid_out(x, step, kernel, keys, given)


class DtypeRounding:
    """How tensors of one dtype are rounded to a format.

    Attributes:
        plan: How to round; None if nothing is to do, or if ``function`` does it.
        function: The user's own.
        kernel: The compiled plan, once there is one.
        is_native: The plan computes in the tensors' own dtype.
        layout: Which values are rounded together; None if each is rounded by itself.
    """

    __slots__ = ("function", "has_no_kernel", "is_native", "kernel", "layout", "plan")

    def __init__(
        self,
        plan: Plan | None,
        layout: Layout | None,
        dtype: torch.dtype,
        function: Rounder | None = None,
    ) -> None:
        self.plan, self.layout, self.function = plan, layout, function
        self.is_native = self.plan is not None and self.plan.binary.dtype is dtype
        self.kernel: calls.Kernel | None = None
        self.has_no_kernel = False

    def find_kernel(self) -> calls.Kernel | None:
        """Returns the compiled plan; None while there is none."""
        if self.has_no_kernel or self.plan is None:
            return None
        library = kernel_library.library()
        if library is not None:
            self.kernel = calls.kernel(self.plan, library)
            self.has_no_kernel = self.kernel is None
        return self.kernel

    def grid(self, x: Tensor) -> Grid:
        """Returns the grid of a tensor, as `Layout.grid` does."""
        return NO_GRID if self.layout is None else self.layout.grid(x)

    def given(self, scale: Tensor) -> tuple[float] | None:
        """Returns the one scale that the kernel is given; None if there are more, or it is elsewhere."""
        assert self.plan is not None
        if not self.plan.has_one_scale or not has_own_memory(scale):
            return None
        return (scale.item(),)


def has_own_memory(x: Tensor) -> bool:
    """Whether kernels may read the memory of ``x``, with nobody between who is to see it."""
    return (
        x.is_cpu
        and type(x) in PLAIN_TENSORS
        and not (dispatch_modes() or is_batch(x))
        and transforms() is None
        and jit_tracing_state() is None
        and x.layout is torch.strided
    )


def rounding_of(format: Format, mode: str, overflow: str | None) -> Rounding:
    """Returns what rounds to a format in one way, made once for each.

    Raises:
        OptionError: The format can't be rounded to in this way; or ``HMPX_KERNELS`` is wrong.
    """
    key = (Rounding, mode, overflow)
    found: Rounding | None
    try:
        found = format.derived.get(key)
    except Exception:  # what has no hash is not a string; it is refused below
        found = None
    if found is None:
        format.check_rounding(mode, overflow)
        kernel_library.library(is_essential=False)
        mode = str.__str__(mode)
        overflow = None if overflow is None else str.__str__(overflow)
        found = format.derived[Rounding, mode, overflow] = Rounding(format, mode, overflow)
    return found


def check_dense(x: Tensor) -> None:
    """Refuses sparse tensors.

    Raises:
        OptionError: ``x`` is one.
    """
    if x.layout in SPARSE:
        raise OptionError(
            f"number formats take dense tensors, not one of {x.layout}; its values() are dense"
        )


@run_when_traced
def _constants_of(
    format: Format, mode: str, overflow: str | None, dtype: torch.dtype
) -> tuple[Any, ...]:
    """Returns the plan that dynamo is to trace as constants, none if nothing is to do."""
    plan = rounding_of(format, mode, overflow).for_dtype(dtype).plan
    return () if plan is None else plan.constants()


@run_when_traced
def _text_of(format: Format, mode: str, overflow: str | None, dtype: torch.dtype) -> str:
    """Returns what a graph's op is told, the plan and which values it rounds together."""
    plan = rounding_of(format, mode, overflow).for_dtype(dtype).plan
    assert plan is not None
    return graph_op.text_of(plan, format.layout)


def plan_of(kind: str, mantissa: int, *rest: Any) -> Plan:
    """Returns the plan whose `Plan.constants` these are."""
    return PLANS[kind].from_constants(FP32 if mantissa == 23 else FP64, *rest)


def _laid_out(
    x: Tensor,
    step: DtypeRounding,
    kernel: calls.Kernel,
    keys: tuple[int, int],
    given: tuple[float, ...],
) -> Tensor:
    """Returns ``x`` rounded by a kernel, in other strides or another dtype than it wants."""
    is_placed = keys is not NO_KEYS or not (step.layout is None or step.layout.takes_strides)
    if is_placed and not x.is_contiguous():
        # An element's noise depends on its place, not on strides.
        return EMPTY_LIKE(x).copy_(_laid_out(CONTIGUOUS(x), step, kernel, keys, given))
    assert step.plan is not None
    if step.is_native:
        source, result = x, EMPTY_LIKE(x)
        if result.stride() != x.stride():  # there is memory between its elements
            source = result.copy_(x)
    else:
        source = result = CAST[step.plan.binary.dtype](x)
    grid, count = step.grid(source), source.numel()
    if count:
        threads = 1 if count < THREADED else torch.get_num_threads()
        kernel(source.data_ptr(), result.data_ptr(), count, *keys, threads, grid, *given)
    return CAST[x.dtype](result)


def _by_ops(x: Tensor, step: DtypeRounding, keys: tuple[int, int], scale: Tensor | None) -> Tensor:
    """Returns ``x`` rounded by torch ops, with its strides."""
    plan, layout = step.plan, step.layout
    assert plan is not None
    work = CAST[plan.binary.dtype](x)
    rows = CONTIGUOUS(work if layout is None else layout.to_rows(work))
    if scale is not None or plan.is_whole:
        result = rounded_rows(rows, plan, layout, (signed(keys[0]), signed(keys[1])), scale)
    else:
        result = rows if rows.data_ptr() != x.data_ptr() else EMPTY_LIKE(rows)
        round_in_parts(rows, result, plan, keys)
    return as_laid_out(
        CAST[x.dtype](result if layout is None else layout.from_rows(result, x.shape)), x
    )


@functools.lru_cache(maxsize=4096)
def _step_of(text: str, dtype: torch.dtype) -> DtypeRounding:
    constants, layout = graph_op.read(text)
    return DtypeRounding(plan_of(*constants), layout, dtype)


def _op(x: Tensor, text: str, keys: tuple[int, int] | None) -> Tensor:
    return rounded(x, _step_of(text, x.dtype), keys or NO_KEYS)


graph_op.run_by(_op)
