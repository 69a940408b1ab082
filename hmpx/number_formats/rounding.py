"""Rounds tensors to one format with fixed options, by kernels, torch ops or in graphs.

Compiled kernels run plans on the CPU, else torch ops, for any floating dtype, strides and device. Graphs of
torch.compile on the CPU contain one op, which compiles seconds faster than the dozen ops that compose it.
Elsewhere compilers fuse these, which costs less than another pass over memory. Exported programs also contain
them, since they run without hmpx. `quantize` adds autograd.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from ..errors import OptionError, shown
from ..patching import unpatched
from ..tensors import CAST, PLAIN_TENSORS, SPARSE, is_in_memory
from ..torch_internals import (
    HAS_OPERATORS,
    FakeTensor,
    FunctionalTensor,
    dispatch_modes,
    has_tangents,
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
from .families import Format, Params, Rounder, params_of
from .registered import get
from .unpatched import ARANGE, CLONE, CONTIGUOUS, EMPTY_LIKE

# Unpatched: op lists may name any of them.
_method = vars(torch.autograd.Function)["apply"]
(_apply,) = unpatched(getattr(_method, "__func__", _method))  # since torch 2.14 a C descriptor

#: The classes of tensors that dynamo and AOTAutograd trace.
_TRACED: Final = frozenset({*PLAIN_TENSORS, FunctionalTensor, FakeTensor})


class RoundingPlan:
    """How tensors of one dtype are rounded to one format with fixed options."""

    def __init__(self, format: Format, params: Params) -> None:
        self.format, self.params, self.kernel = format, params, format.kernel(params)
        self.function: Any = None  # of C
        if self.kernel is not None:
            name = f"{self.kernel.name}_f{params.binary.width}"
            self.function = kernels.function(name, "round")


class FormatRounding:
    """Rounds to one format with fixed options."""

    __slots__ = ("_function", "_plans", "encoders", "format", "mode", "overflow")

    def __init__(self, format: Format, mode: str, overflow: str | None) -> None:
        self.format, self.mode, self.overflow = format, mode, overflow
        self._function = format.own_function
        self._plans: dict[torch.dtype, RoundingPlan | None] = {}
        self.encoders: dict[torch.dtype, Any] = {}

    def __call__(
        self, x: Tensor, generator: torch.Generator | None = None, scale: Tensor | None = None
    ) -> Tensor:
        """Returns ``x`` rounded, without gradients. Arguments and errors are those of `quantize`."""
        format, function = self.format, self._function
        if scale is not None:
            format.check_scale(scale, x)
        if torch.compiler.is_dynamo_compiling():  # the ops become part of the graph
            if function is not None:
                return function(x)
            params = params_of(format, x.dtype, self.mode, self.overflow)
            if params is None:
                return x
            if scale is None and x.is_cpu and takes_operators(x):
                return self._in_graph(x, generator)
            return _by_ops(x, format, params, _traced_keys(x, params.mode, generator), scale)
        plan = self._plans[x.dtype] if x.dtype in self._plans else self.plan(x.dtype)
        if plan is None:
            return x if function is None else function(x)
        if has_own_memory(x):
            keys = NO_KEYS if self.mode != "stochastic" else draw_keys(generator)
            return _rounded(x, plan, keys, scale)
        if is_gradient_batch(x):
            return one_of_batch(lambda each: self(each, generator, scale), x)
        if scale is None and x.is_cpu and takes_operators(x):
            return self._in_graph(x, generator)
        check_dense(x)
        with torch.no_grad():
            return _by_ops(x, format, plan.params, _traced_keys(x, self.mode, generator), scale)

    def _in_graph(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        text = text_of(self.format, self.mode, self.overflow)
        keys = traced_keys(x, generator) if self.mode == "stochastic" else None
        found: Tensor = OP(x.detach(), text, keys)
        return found

    def plan(self, dtype: torch.dtype) -> RoundingPlan | None:
        """Returns the plan for tensors of one dtype; None if none is needed. Checks the dtype."""
        if dtype not in self._plans:
            params = params_of(self.format, dtype, self.mode, self.overflow)
            self._plans[dtype] = None if params is None else RoundingPlan(self.format, params)
        return self._plans[dtype]


def rounding_of(format: Format, mode: str, overflow: str | None) -> FormatRounding:
    """Returns the cached `FormatRounding` for a format and options; raises `OptionError` if unsupported."""
    found: FormatRounding | None
    try:
        found = format.derived.get((FormatRounding, mode, overflow))
    except TypeError:  # unhashable, so not a string
        found = None
    if found is None:
        format.check_rounding(mode, overflow)
        kernels.library(is_essential=False)
        found = format.derived[FormatRounding, mode, overflow] = FormatRounding(
            format, mode, overflow
        )
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
    if x.layout in SPARSE:
        raise OptionError(
            f"number formats take dense tensors, not one of {x.layout}; its values() are dense"
        )


# --- by kernels --------------------------------------------------------------------------------


def _rounded(
    x: Tensor, plan: RoundingPlan, keys: tuple[int, int], scale: Tensor | None = None
) -> Tensor:
    """Returns ``x``, on the CPU and with its own memory, rounded by a kernel or torch ops."""
    if not is_in_memory(x):
        x = EMPTY_LIKE(x).copy_(x.detach())
    kernel, dtype = plan.kernel, plan.params.binary.dtype
    takes_scale = scale is None or (kernel and kernel.takes_scale and has_own_memory(scale))
    if plan.function is None or kernel is None or not takes_scale:
        first, second = (key - 2**32 if key >= 2**31 else key for key in keys)
        with torch.no_grad():
            return _by_ops(x, plan.format, plan.params, (first, second), scale)
    given = None if scale is None else scale.item()
    if dtype is x.dtype and x.is_contiguous():
        return _run(plan, x, EMPTY_LIKE(x), keys, given)
    with torch.no_grad():
        # An element's noise depends on its index, not on strides.
        is_placed = plan.params.mode == "stochastic" or not kernel.takes_strides
        source = CONTIGUOUS(x) if is_placed else x
        target = EMPTY_LIKE(source, dtype=dtype)
        if dtype is not x.dtype or target.stride() != source.stride():  # its memory has gaps
            source = target.copy_(source)
        found = CAST[x.dtype](_run(plan, source, target, keys, given))
        return EMPTY_LIKE(x).copy_(found) if is_placed and not x.is_contiguous() else found


def _run(
    plan: RoundingPlan, source: Tensor, target: Tensor, keys: tuple[int, int], given: float | None
) -> Tensor:
    assert plan.kernel is not None
    struct, count = plan.kernel.struct_for(source, given), source.numel()
    if count:
        threads = kernels.threads_for(count)
        plan.function(source.data_ptr(), target.data_ptr(), count, struct, *keys, threads)
    return target


# --- by torch ops ------------------------------------------------------------------------------


def _by_ops(
    x: Tensor, format: Format, params: Params, keys: tuple[Key, Key], scale: Tensor | None
) -> Tensor:
    x = x.detach()
    values, noise = CAST[params.binary.dtype](x), None
    if params.mode == "stochastic":
        # An index has 32 bits, like an element of the result.
        index = ARANGE(x.numel(), dtype=torch.int64, device=x.device).to(torch.int32)
        noise = random_bits(format.noise_index(index, x), keys)
    if scale is None:
        found = format.round(values, noise, params)
    else:
        assert isinstance(format, families.Scaled)
        found = format.round(values, noise, params, CAST[torch.float32](scale.detach()))
    found = CAST[x.dtype](found)
    is_laid_out = found.stride() == x.stride() or (x.is_contiguous() and found.is_contiguous())
    if type(x) not in PLAIN_TENSORS or is_laid_out:
        return found.detach()
    # Not a view: autograd refuses writes to views made without it.
    return EMPTY_LIKE(x).copy_(found)


def _traced_keys(x: Tensor, mode: str, generator: torch.Generator | None) -> tuple[Key, Key]:
    if mode != "stochastic":
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
def text_of(format: Format, mode: str, overflow: str | None) -> str:
    """Returns a rounding as JSON, for graphs."""
    return json.dumps(
        [format, mode, overflow],
        default=lambda each: {"family": type(each).__name__, **each.__getstate__()},
    )


@functools.lru_cache(maxsize=4096)
def rounding_in(text: str) -> FormatRounding:
    return rounding_of(*json.loads(text, object_hook=_format_of))


def _format_of(values: dict[str, Any]) -> Format:
    return getattr(families, values.pop("family"))(**values)  # type: ignore[no-any-return]


def takes_operators(x: Tensor) -> bool:
    """Whether ``x`` is in a graph of torch.compile, without transforms that have no rule for operators of hmpx."""
    return type(x) in _TRACED and _is_compiled()


@run_when_traced
def _is_compiled() -> bool:
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

    Rounds once, also float64. If ``x``'s dtype lacks values of the format (float16 numbers in
    bfloat16), the result is also rounded to that dtype. NaN stays NaN, even if the format has none.
    Gradients are straight-through. If the format has every value of the dtype, ``x`` itself is
    returned.

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
            `Scaled.scale`, in the shape of `Scaled.amax`. With ``tensor_scale`` the tensor's scale
            only. Values beyond the largest element saturate, also infinities.

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
    # Dynamo can't trace a cache.
    make = FormatRounding if torch.compiler.is_dynamo_compiling() else rounding_of
    return straight_through(x, make(get(format), rounding, overflow), None, generator, scale)


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
    return format.own_function is None and params_of(format, torch.float32) is None


def straight_through(
    tensor: Tensor,
    round_: Callable[..., Tensor] | None,
    round_gradient: Rounder | None = None,
    *args: Any,
) -> Tensor:
    """Rounds ``tensor`` by ``round_``, and its gradients of any order by ``round_gradient``; None rounds nothing.

    ``args`` are further arguments of ``round_``.
    """
    if round_ is None and round_gradient is None:
        return tensor
    if may_learn(tensor):
        return _Rounded.apply(tensor, round_, round_gradient, *args)  # type: ignore[no-any-return]
    # A batch of gradients hides whether gradients are recorded.
    if torch.is_grad_enabled() and is_gradient_batch(tensor):
        return one_of_batch(
            lambda each: straight_through(each, round_, round_gradient, *args), tensor
        )
    return tensor if round_ is None else round_(tensor, *args)


class _Rounded(torch.autograd.Function):
    drawn_as = "cast"

    generate_vmap_rule = True
    apply: Any = classmethod(_apply)  # the patched one takes three times as long

    @staticmethod
    def forward(
        tensor: Tensor, round_: Rounder | None, round_gradient: Rounder | None, *args: Any
    ) -> Tensor:
        result = tensor if round_ is None else round_(tensor, *args)
        if result is not tensor:
            return result
        # The tangent of a view must be a view, but a rounded one is not.
        is_copied = round_gradient is not None and has_tangents()
        return CLONE(tensor) if is_copied else tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.round, ctx.others = inputs[2], (None,) * (len(inputs) - 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # With create_graph=True the gradient's own gradient is also rounded.
        return straight_through(gradient, ctx.round, ctx.round), *ctx.others

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *others: None) -> Tensor:
        if ctx.round is None:
            return tangent.view_as(tangent)
        return straight_through(tangent, ctx.round, ctx.round)


#: The function of autograd whose nodes `straight_through` makes.
Rounded = _Rounded
