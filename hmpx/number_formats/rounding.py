"""Rounds tensors to one format with fixed options, by kernels, torch ops or in graphs.

Compiled kernels run plans on the CPU, else torch ops, for any floating dtype, strides and device. Graphs of
torch.compile on the CPU contain one op, which compiles seconds faster than the dozen ops that compose it.
Elsewhere compilers fuse these, which costs less than another pass over memory. Exported programs also contain
them, since they run without hmpx. `quantize` adds autograd.
"""

from __future__ import annotations

import functools
import json
from dataclasses import fields
from typing import Any, Final, cast

import torch
from torch import Tensor

from ..errors import OptionError, shown
from ..tensors import CAST, PLAIN_TENSORS, SPARSE, is_in_memory
from ..torch_internals import (
    HAS_OPERATORS,
    FakeTensor,
    FunctionalTensor,
    dispatch_modes,
    is_batch,
    is_gradient_batch,
    jit_tracing_state,
    may_learn,
    one_of_batch,
    own_operator,
    run_when_traced,
    set_kernel,
    tracing_context,
    transforms,
)
from . import families, kernels
from .bits import NO_KEYS, Key, draw_keys, random_bits, traced_keys
from .families import Format, Rounder
from .plans import NO_GRID, Plan, plan_of
from .registered import get
from .unpatched import ARANGE, CONTIGUOUS, EMPTY_LIKE

#: The classes of tensors that dynamo and AOTAutograd trace.
_TRACED: Final = frozenset({*PLAIN_TENSORS, FunctionalTensor, FakeTensor})


class Rounding:
    """Rounds to one format with fixed options; plans and kernels are created once per dtype."""

    __slots__ = ("_function", "_plans", "encoders", "format", "mode", "overflow")

    def __init__(self, format: Format, mode: str, overflow: str | None) -> None:
        self.format, self.mode, self.overflow = format, mode, overflow
        self._function = format.own_function
        self._plans: dict[torch.dtype, Plan | None] = {}
        self.encoders: dict[torch.dtype, tuple[Plan, kernels.Kernel] | None] = {}

    def __call__(
        self, x: Tensor, generator: torch.Generator | None = None, scale: Tensor | None = None
    ) -> Tensor:
        """Returns ``x`` rounded, without gradients. Arguments and errors are those of `quantize`."""
        if scale is not None:
            self.format.check_scale(scale, x)
        function = self._function
        if torch.compiler.is_dynamo_compiling():  # the ops become part of the graph
            if function is not None:
                return function(x)
            constants = _constants_of(self.format, self.mode, self.overflow, x.dtype)
            if not constants:
                return x
            if scale is None and _is_taken(x):
                return self._in_graph(x, generator)
            plan = plan_of(*constants)
            return _by_ops(x, plan, _traced_keys(x, plan, generator), scale)
        plan = self._plans[x.dtype] if x.dtype in self._plans else self.plan(x.dtype)
        if plan is None:
            return x if function is None else function(x)
        if not has_own_memory(x):
            if is_gradient_batch(x):
                return one_of_batch(lambda each: self(each, generator, scale), x)
            if scale is None and _is_taken(x):
                return self._in_graph(x, generator)
            check_dense(x)
            with torch.no_grad():
                return _by_ops(x, plan, _traced_keys(x, plan, generator), scale)
        keys = NO_KEYS if self.mode != "stochastic" else draw_keys(generator)
        return _rounded(x, plan, keys, scale)

    def _in_graph(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        text = text_of(self.format, self.mode, self.overflow)
        keys = traced_keys(x, generator) if self.mode == "stochastic" else None
        found: Tensor = OP(x.detach(), text, keys)
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
        found = format.derived[Rounding, mode, overflow] = Rounding(format, mode, overflow)
    return found


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


def _rounded(x: Tensor, plan: Plan, keys: tuple[int, int], scale: Tensor | None = None) -> Tensor:
    """Returns ``x``, on the CPU and with its own memory, rounded by a kernel or torch ops."""
    if not is_in_memory(x):
        x = EMPTY_LIKE(x).copy_(x.detach())
    kernel = plan.compiled
    if kernel is None or not (scale is None or (plan.has_one_scale and has_own_memory(scale))):
        first, second = (key - 2**32 if key >= 2**31 else key for key in keys)
        with torch.no_grad():
            return _by_ops(x, plan, (first, second), scale)
    given = None if scale is None else scale.item()
    if plan.binary.dtype is x.dtype and x.is_contiguous():
        return _run(plan, x, EMPTY_LIKE(x), keys, given)
    with torch.no_grad():
        return _laid_out(x, plan, keys, given)


def _run(
    plan: Plan, source: Tensor, target: Tensor, keys: tuple[int, int], given: float | None
) -> Tensor:
    layout, count, kernel = plan.layout, source.numel(), plan.compiled
    grid = NO_GRID if layout is None else layout.grid(source, is_in_memory=True)
    if count and kernel is not None:
        threads = kernels.threads_for(count)
        kernel((source.data_ptr(), target.data_ptr(), count, *keys, threads), grid, given)
    return target


def _laid_out(x: Tensor, plan: Plan, keys: tuple[int, int], given: float | None) -> Tensor:
    """Returns ``x`` rounded by a kernel that needs other strides or another dtype."""
    is_placed = plan.mode == "stochastic" or not (plan.layout is None or plan.layout.takes_strides)
    if is_placed and not x.is_contiguous():
        # An element's noise depends on its index, not on strides.
        return EMPTY_LIKE(x).copy_(_laid_out(CONTIGUOUS(x), plan, keys, given))
    if plan.binary.dtype is x.dtype:
        source, target = x, EMPTY_LIKE(x)
        if target.stride() != x.stride():  # its memory has gaps
            source = target.copy_(x)
    else:
        source = target = CAST[plan.binary.dtype](x)
    return CAST[x.dtype](_run(plan, source, target, keys, given))


# --- by torch ops ------------------------------------------------------------------------------


def _by_ops(x: Tensor, plan: Plan, keys: tuple[Key, Key], scale: Tensor | None) -> Tensor:
    x = x.detach()
    values, noise = CAST[plan.binary.dtype](x), None
    if plan.mode == "stochastic":
        # An index has 32 bits, like an element of the result.
        index = ARANGE(x.numel(), dtype=torch.int64, device=x.device).to(torch.int32)
        layout = plan.layout if x.numel() else None
        index = index.view(x.shape) if layout is None else layout.noise_index(index, x)
        noise = random_bits(index, keys)
    if scale is None:
        found = plan.round(values, noise)
    else:
        found = plan.round_by(values, noise, CAST[torch.float32](scale.detach()))
    found = CAST[x.dtype](found)
    is_laid_out = found.stride() == x.stride() or (x.is_contiguous() and found.is_contiguous())
    if type(x) not in PLAIN_TENSORS or is_laid_out:
        return found.detach()
    # Not a view: autograd refuses writes to views made without it.
    return EMPTY_LIKE(x).copy_(found)


def _traced_keys(x: Tensor, plan: Plan, generator: torch.Generator | None) -> tuple[Key, Key]:
    if plan.mode != "stochastic":
        return NO_KEYS
    drawn = traced_keys(x, generator).to(torch.int32)
    return drawn[0], drawn[1]


# --- in graphs ---------------------------------------------------------------------------------

#: Takes a tensor, the rounding as text, and the keys of noise.
OP: Final = own_operator(
    "rounded(Tensor x, str text, Tensor? keys) -> Tensor", lambda x, text, keys: EMPTY_LIKE(x)
)


def _run_op(x: Tensor, text: str, keys: Tensor | None) -> Tensor:
    first, second = (0, 0) if keys is None else keys.tolist()
    plan = rounding_in(text).plan(x.dtype)
    assert plan is not None
    return _rounded(x, plan, (first & 0xFFFFFFFF, second & 0xFFFFFFFF))


set_kernel(OP, _run_op, "CPU")


@run_when_traced
def _constants_of(
    format: Format, mode: str, overflow: str | None, dtype: torch.dtype
) -> tuple[Any, ...]:
    """Returns the plan that dynamo traces as constants; empty if rounding changes nothing."""
    plan = rounding_of(format, mode, overflow).plan(dtype)
    return () if plan is None else plan.constants()


@run_when_traced
def text_of(format: Format, mode: str, overflow: str | None) -> str:
    """Returns a rounding as JSON, for graphs."""
    return json.dumps([_values_of(format), mode, overflow])


def _values_of(value: Any) -> Any:
    if not isinstance(value, families.FORMATS):
        return value
    values = {each.name: _values_of(getattr(value, each.name)) for each in fields(value)}
    return {"family": type(value).__name__, **values}


@functools.lru_cache(maxsize=4096)
def rounding_in(text: str) -> Rounding:
    """Returns the rounding of a result of `text_of`."""
    return rounding_of(*json.loads(text, object_hook=_format_of))


def _format_of(values: dict[str, Any]) -> Format:
    return getattr(families, values.pop("family"))(**values)  # type: ignore[no-any-return]


def _is_taken(x: Tensor) -> bool:
    """Whether a graph that torch.compile traces uses the op for ``x``."""
    return type(x) in _TRACED and x.device.type == "cpu" and is_compiled()


@run_when_traced
def is_compiled() -> bool:
    """Whether torch.compile is tracing, without transforms that have no rule for the op."""
    return (
        HAS_OPERATORS
        and tracing_context() is not None
        and not torch.compiler.is_exporting()
        and transforms() is None
    )


# --- with autograd -------------------------------------------------------------------------------


def quantize(
    x: Tensor,
    format: str | torch.dtype | Format,
    rounding: str = "nearest",
    overflow: str | None = None,
    generator: torch.Generator | None = None,
    *,
    scale: Tensor | None = None,
) -> Tensor:
    """Returns ``x`` rounded to a number format, in the same shape and dtype.

    Rounds once: float64 is not rounded to float32 first. If ``x``'s dtype lacks values of the format
    (float16 numbers in bfloat16), the result is also rounded to that dtype. NaN stays NaN, even if the
    format has none. Gradients are straight-through. If the format has every value of the dtype, ``x``
    itself is returned, as by `Tensor.to`.

    Args:
        x: float32, float64, bfloat16 or float16; on any device; dense, of any strides.
        format: A format, or an argument of `get`.
        rounding: ``"nearest"`` (ties to even), ``"nearest_away"`` (ties away from zero),
            ``"toward_zero"``, ``"up"``, ``"down"``, or ``"stochastic"``: to a
            random neighbour, with probability proportional to nearness.
        overflow: How values beyond the largest are handled: ``"saturate"``, ``"inf"`` or ``"nan"``, if the
            format has them; None: by its standard.
        generator: The seed of ``"stochastic"``; None: torch's own. One draw per call.
        scale: For a `Scaled` format: scales to use instead of those of ``x``, such as results of
            `Scaled.scale` for the largest magnitudes of earlier tensors, in the shape of `Scaled.amax`. With
            ``tensor_scale`` the tensor's scale; blocks still have their own. Values beyond the largest
            element saturate, also infinities.

    Raises:
        OptionError: The format is unknown or does not support ``rounding``, ``overflow`` or ``scale``; ``x``
            is not a tensor of these dtypes; or ``HMPX_KERNELS`` is invalid.

    Example:
        >>> x = torch.tensor([1.1, 1000.0])
        >>> hmpx.formats.quantize(x, "float8_e4m3fn")
        tensor([1.1250,    nan])
        >>> hmpx.formats.quantize(x, "float8_e4m3fn", rounding="up", overflow="saturate")
        tensor([  1.1250, 448.0000])
    """
    if not isinstance(x, Tensor):
        raise OptionError(f"quantize takes a tensor, not {type(x).__name__}")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise OptionError(f"generator must be a torch.Generator, not {shown(generator)}")
    if torch.compiler.is_dynamo_compiling():
        run = Rounding(get(format), rounding, overflow)  # checks its arguments at trace time
        function: type[_StraightThrough] = _StraightThrough  # dynamo does not support jvp
    elif is_batch(x) and torch.is_grad_enabled() and is_gradient_batch(x):
        args = format, rounding, overflow, generator  # batches hide whether gradients are recorded
        return one_of_batch(lambda each: quantize(each, *args, scale=scale), x)
    else:
        run, function = rounding_of(get(format), rounding, overflow), _ForwardToo
    if may_learn(x):
        return cast(Tensor, function.apply(x, run, generator, scale))  # type: ignore[no-untyped-call]
    return run(x, generator, scale)


def rounder(
    format: str | torch.dtype | Format,
    rounding: str = "nearest",
    overflow: str | None = None,
    generator: torch.Generator | None = None,
) -> Rounder:
    """Returns a function that rounds a tensor like `quantize`, without gradients.

    For many calls: it does not look up names in a call. Raises as `quantize` does.
    """
    run = rounding_of(get(format), rounding, overflow)
    if generator is None:
        return run
    return lambda x: run(x, generator)


def rounds_nothing(format: Format) -> bool:
    """Whether the format has every float32 value."""
    return format.own_function is None and format.plan(torch.float32, "nearest", None) is None


class _StraightThrough(torch.autograd.Function):
    drawn_as = "cast"

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, run: Rounding, generator: torch.Generator | None, scale: Tensor | None
    ) -> Tensor:
        rounded = run(x, generator, scale)
        return x.view_as(x) if rounded is x else rounded

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None: ...

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient, None, None, None


class _ForwardToo(_StraightThrough):
    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *others: None) -> Tensor:
        return tangent.view_as(tangent)
