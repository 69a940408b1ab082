"""Rounds tensors to one format with fixed options, by kernels, torch ops or in graphs.

Compiled kernels run plans on the CPU, else torch ops, for any floating dtype, strides and device.
`quantization` adds autograd.
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
from . import graph_op, kernels
from .families import Format
from .kernels.calls import Kernel, threads_for
from .layouts import NO_GRID, Layout
from .noise import NO_KEYS, Key, draw_keys, random_bits, traced_keys
from .plans import Plan, plan_of
from .unpatched import CONTIGUOUS, EMPTY_LIKE

#: Elements of a part: intermediate results fit into the cache, and the overhead of calls is small.
_CACHED: Final = 131072


class Rounding:
    """Rounds to one format with fixed options; plans and kernels are created once per dtype."""

    __slots__ = ("_plans", "encoders", "format", "layout", "mode", "overflow")

    def __init__(self, format: Format, mode: str, overflow: str | None) -> None:
        self.format, self.mode, self.overflow = format, mode, overflow
        self.layout = format.layout
        self._plans: dict[torch.dtype, Plan | None] = {}
        self.encoders: dict[torch.dtype, tuple[Plan, Kernel] | None] = {}

    def __call__(
        self, x: Tensor, generator: torch.Generator | None = None, scale: Tensor | None = None
    ) -> Tensor:
        """Returns ``x`` rounded, without gradients. Arguments and errors are those of `quantize`."""
        if scale is not None:
            self.format.check_scale(scale, x)
        if torch.compiler.is_dynamo_compiling():
            return self._in_dynamo(x, generator, scale)
        try:
            plan = self._plans[x.dtype]
        except KeyError:
            plan = self.plan(x.dtype)
        if plan is None:
            function = self.format.own_function
            return x if function is None else function(x)
        if not has_own_memory(x):
            if is_gradient_batch(x):
                return one_of_batch(lambda each: self(each, generator, scale), x)
            if scale is None and graph_op.is_taken(x):
                return self._in_graph(x, generator)
            check_dense(x)
            with torch.no_grad():
                return _by_traceable_ops(x, plan, self.layout, generator, scale)
        keys = NO_KEYS if self.mode != "stochastic" else draw_keys(generator)
        return _rounded(x, plan, self.layout, keys, scale)

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
        return _by_traceable_ops(x, plan_of(*constants), self.layout, generator, scale)

    def _in_graph(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """Returns ``x`` rounded by one op of a graph."""
        text = _text_of(self.format, self.mode, self.overflow, x.dtype)
        keys = traced_keys(x, generator) if self.mode == "stochastic" else None
        found: Tensor = graph_op.OP(x.detach(), text, keys)
        return found

    def plan(self, dtype: torch.dtype) -> Plan | None:
        """Returns the plan for tensors of one dtype; None if none is needed. Checks the dtype."""
        if dtype not in self._plans:
            if dtype not in CAST:
                raise OptionError(
                    f"quantize takes tensors of {', '.join(map(str, CAST))}, not {dtype}; cast it first"
                )
            self._plans[dtype] = self.format.plan(dtype, self.mode, self.overflow)
        return self._plans[dtype]


def rounding_of(format: Format, mode: str, overflow: str | None) -> Rounding:
    """Returns the cached `Rounding` for a format and options; raises `OptionError` if unsupported."""
    found: Rounding | None
    try:
        found = format.derived.get((Rounding, mode, overflow))
    except TypeError:  # unhashable, so not a string
        found = None
    if found is None:
        format.check_rounding(mode, overflow)
        kernels.library(is_essential=False)
        mode = str.__str__(mode)
        overflow = None if overflow is None else str.__str__(overflow)
        found = format.derived[Rounding, mode, overflow] = Rounding(format, mode, overflow)
    return found


@run_when_traced
def _constants_of(
    format: Format, mode: str, overflow: str | None, dtype: torch.dtype
) -> tuple[Any, ...]:
    """Returns the plan that dynamo traces as constants; empty if rounding changes nothing."""
    plan = rounding_of(format, mode, overflow).plan(dtype)
    return () if plan is None else plan.constants()


@run_when_traced
def _text_of(format: Format, mode: str, overflow: str | None, dtype: torch.dtype) -> str:
    """Returns the plan and the layout as text, for a graph's op."""
    plan = rounding_of(format, mode, overflow).plan(dtype)
    assert plan is not None
    return graph_op.text_of(plan, format.layout)


def has_own_memory(x: Tensor) -> bool:
    """Whether kernels may read the memory of ``x``: no mode or transform needs to see the call."""
    return (
        x.is_cpu
        and type(x) in PLAIN_TENSORS
        and not (dispatch_modes() or is_batch(x))
        and transforms() is None
        and jit_tracing_state() is None
        and x.layout is torch.strided
    )


def check_dense(x: Tensor) -> None:
    """Raises `OptionError` for sparse tensors."""
    if x.layout in SPARSE:
        raise OptionError(
            f"number formats take dense tensors, not one of {x.layout}; its values() are dense"
        )


# --- by kernels --------------------------------------------------------------------------------


def _rounded(
    x: Tensor, plan: Plan, layout: Layout | None, keys: tuple[int, int], scale: Tensor | None = None
) -> Tensor:
    """Returns ``x``, on the CPU and with its own memory, rounded by a kernel or torch ops."""
    if not is_in_memory(x):
        x = EMPTY_LIKE(x).copy_(x.detach())
    kernel = plan.compiled
    if kernel is None or not (scale is None or (plan.has_one_scale and has_own_memory(scale))):
        with torch.no_grad():
            return _by_ops(x, plan, layout, keys, scale)
    given = None if scale is None else scale.item()
    if plan.binary.dtype is x.dtype and x.is_contiguous():
        return _run(kernel, x, EMPTY_LIKE(x), layout, keys, given)
    with torch.no_grad():
        return _laid_out(x, plan, layout, keys, given)


def _run(  # noqa: PLR0917  # for speed
    kernel: Kernel,
    source: Tensor,
    target: Tensor,
    layout: Layout | None,
    keys: tuple[int, int],
    given: float | None,
) -> Tensor:
    grid, count = NO_GRID if layout is None else layout.grid(source), source.numel()
    if count:
        threads = threads_for(count)
        kernel(source.data_ptr(), target.data_ptr(), count, *keys, threads, grid, given)
    return target


def _laid_out(
    x: Tensor, plan: Plan, layout: Layout | None, keys: tuple[int, int], given: float | None
) -> Tensor:
    """Returns ``x`` rounded by a kernel that needs other strides or another dtype."""
    is_placed = plan.mode == "stochastic" or not (layout is None or layout.takes_strides)
    if is_placed and not x.is_contiguous():
        # An element's noise depends on its index, not on strides.
        return EMPTY_LIKE(x).copy_(_laid_out(CONTIGUOUS(x), plan, layout, keys, given))
    if plan.binary.dtype is x.dtype:
        source, target = x, EMPTY_LIKE(x)
        if target.stride() != x.stride():  # its memory has gaps
            source = target.copy_(x)
    else:
        source = target = CAST[plan.binary.dtype](x)
    assert plan.compiled is not None
    return CAST[x.dtype](_run(plan.compiled, source, target, layout, keys, given))


# --- by torch ops ------------------------------------------------------------------------------


def _by_traceable_ops(
    x: Tensor,
    plan: Plan,
    layout: Layout | None,
    generator: torch.Generator | None,
    scale: Tensor | None,
) -> Tensor:
    """Returns ``x`` rounded as a whole by torch ops: traceable, on any device."""
    x = x.detach()
    keys: tuple[Key, Key] = NO_KEYS
    if plan.mode == "stochastic":
        drawn = traced_keys(x, generator).to(torch.int32)
        keys = (drawn[0], drawn[1])
    rows = CAST[plan.binary.dtype](x)
    if layout is not None:
        rows = layout.to_rows(rows)
    found = _from_rows(_rounded_rows(rows, plan, layout, keys, scale), layout, x)
    return _as_laid_out(found, x) if type(x) in PLAIN_TENSORS else found.detach()


def _by_ops(
    x: Tensor, plan: Plan, layout: Layout | None, keys: tuple[int, int], scale: Tensor | None
) -> Tensor:
    """Returns ``x`` rounded by torch ops, in parts if possible."""
    work = CAST[plan.binary.dtype](x)
    rows = CONTIGUOUS(work if layout is None else layout.to_rows(work))
    first, second = (key - 2**32 if key >= 2**31 else key for key in keys)
    if scale is not None or plan.is_whole:
        result = _rounded_rows(rows, plan, layout, (first, second), scale)
    else:
        result = rows if rows.data_ptr() != x.data_ptr() else EMPTY_LIKE(rows)
        _round_in_parts(rows, result, plan, (first, second))
    return _as_laid_out(_from_rows(result, layout, x), x)


def _from_rows(rows: Tensor, layout: Layout | None, x: Tensor) -> Tensor:
    return CAST[x.dtype](rows if layout is None else layout.from_rows(rows, x.shape))


def _as_laid_out(found: Tensor, x: Tensor) -> Tensor:
    """Returns ``found`` with the strides of ``x``, not as a view: autograd refuses writes to such views."""
    if found.stride() == x.stride() or (x.is_contiguous() and found.is_contiguous()):
        return found.detach()
    return EMPTY_LIKE(x).copy_(found)


def _rounded_rows(
    rows: Tensor, plan: Plan, layout: Layout | None, keys: tuple[Key, Key], scale: Tensor | None
) -> Tensor:
    """Returns rows rounded by torch ops, by their own scales or by given ones."""
    noise = None
    if plan.mode == "stochastic":
        noise = random_bits(rows.numel(), 0, keys, rows.device).view(rows.shape)
    if scale is None or layout is None:
        return plan.round(rows, noise)
    scale = CAST[torch.float32](scale.detach())
    return plan.round_by(rows, noise, layout.to_rows(scale) if scale.dim() else scale.view(1))


def _round_in_parts(source: Tensor, target: Tensor, plan: Plan, keys: tuple[int, int]) -> None:
    """Rounds contiguous tensors by torch ops, a part at a time that fits into the cache."""
    if not source.numel():
        return
    length = source.shape[-1] if plan.is_by_row and source.dim() else 1
    source, target = source.view(-1, length), target.view(-1, length)
    rows = max(_CACHED // max(length, 1), 1)
    for start in range(0, source.shape[0], rows):
        part = source[start : start + rows]
        part = part if plan.is_by_row else part.view(-1)
        noise = None
        if plan.mode == "stochastic":
            noise = random_bits(part.numel(), start * length, keys, part.device)
            noise = noise.view(part.shape)
        target[start : start + rows].view(part.shape).copy_(plan.round(part, noise))


# --- in graphs ---------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _read(text: str) -> tuple[Plan, Layout | None]:
    constants, layout = graph_op.read(text)
    return plan_of(*constants), layout


graph_op.run_by(lambda x, text, keys: _rounded(x, *_read(text), keys))
