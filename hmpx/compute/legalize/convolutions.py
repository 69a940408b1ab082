"""Legalized convolutions and their gradients, in reused fp32 memory.

The rounding points are those of `wrappers.legalized`, and autograd saves low-precision tensors. In inference the fp32
values of low-precision weights may be cached, in the layout of kernels.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn

from ...tensors import CAST, LOW_DTYPES, PLAIN_TENSORS, Args, is_in_memory
from ...torch_internals import (
    ConvolutionSettings,
    can_be_laid_out,
    convolved,
    has_tangents,
    laid_out,
)
from ..composition import widen
from .scratch import Rounding, Temporaries, is_seen, memory_for

# Read before anything is patched: op lists may name any of them.
_address, _contiguous, _numel = Tensor.data_ptr, Tensor.contiguous, Tensor.numel
_convolution_backward = torch.ops.aten.convolution_backward.default

#: The ops that `compute` supports -> their number of spatial dimensions.
CONVOLUTIONS: Final = {"conv1d": 1, "conv2d": 2, "conv3d": 3}

#: Elements of an input; below this, fresh memory costs less than the bookkeeping here.
_LEAST: Final = 1 << 17

#: Input channels of a group; with fewer, torch's function does not reorder weights.
_LEAST_CHANNELS: Final = 4

#: Elements of a weight; below this, upcasting costs less than caching.
_LEAST_PREPARED: Final = 1 << 15


def is_large(x: Any, weight: Any) -> bool:
    """Whether `compute` is faster for a convolution of ``x`` with ``weight``."""
    try:
        return bool(_numel(x) >= _LEAST or _numel(weight) >= _LEAST)
    except TypeError:  # one is not a tensor
        return False


def compute(
    op: str, function: Callable[..., Tensor], args: Args, dtype: torch.dtype, *, rounds_inputs: bool
) -> Tensor | None:
    """Returns a convolution of tensors of torch's own classes, in ``dtype``; None if unsupported.

    With ``rounds_inputs`` fp32 inputs are rounded first.
    """
    if has_tangents() or is_seen():
        return None
    dimensions = CONVOLUTIONS[op]
    x, weight, bias = (*args[:3], None)[:3]
    settings = _settings(dimensions, args[3:])
    if settings is None or not (is_large(x, weight) or prepared(weight)):
        return None
    for tensor in (x, weight) if bias is None else (x, weight, bias):
        if not isinstance(tensor, Tensor) or tensor.dtype not in {dtype, torch.float32}:
            return None
        if tensor.layout is not torch.strided or tensor.device != x.device or not tensor.numel():
            return None
    if not x.dim() == weight.dim() == dimensions + 2:
        return None  # left to torch
    if weight.dtype is torch.float32 and type(weight) is not nn.Parameter:
        if not rounds_inputs:
            return None
        weight = CAST[dtype](weight)
    kept = None  # saved instead of x
    if x.dtype is torch.float32:
        low = CAST[dtype](x)
        x, kept = (low, None) if rounds_inputs else (x, low)
    apply: Callable[..., Tensor] = _Convolution.apply
    return apply(x, kept, weight, bias, function, settings, Rounding(dtype, rounds_inputs))


def _settings(dimensions: int, given: Args) -> ConvolutionSettings | None:
    """Returns a convolution's settings; None if they are strings, or too short."""
    if len(given) > 4:
        return None
    values: list[Any] = [*given, *(1, 0, 1, 1)[len(given) :]]
    groups = values.pop()
    lists = [(value,) * dimensions if type(value) is int else value for value in values]
    if not all([isinstance(each, (list, tuple)) and len(each) == dimensions for each in lists]):  # noqa: C419
        return None
    strides, padding, dilation = map(tuple, lists)
    return ConvolutionSettings(padding, strides, dilation, groups)


class _Convolution(torch.autograd.Function):
    """The convolution of a batch."""

    drawn_as = "convolution"

    @staticmethod
    def forward(  # noqa: PLR0917  # there are no keywords
        ctx: Any,
        x: Tensor,  # low, unless fp32 inputs are not rounded
        kept: Tensor | None,  # for the backward, instead of an fp32 x
        weight: Tensor,  # low, or a parameter
        bias: Tensor | None,
        function: Callable[..., Tensor],
        settings: ConvolutionSettings,
        rounding: Rounding,
    ) -> Tensor:
        ctx.save_for_backward(x if kept is None else kept, weight)
        ctx.settings, ctx.rounding = settings, rounding
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        memory, found = Temporaries(x.device), prepared(weight)
        given = (x, bias) if found else (x, weight, bias)
        raised = [None if t is None else rounding.raised(t, memory) for t in given]
        if found:
            result = _with_prepared(found, function, raised, weight, settings, rounding.dtype)
        else:
            padding, strides, dilation, groups = settings
            result = CAST[rounding.dtype](function(*raised, strides, padding, dilation, groups))
        memory.free()
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        settings, rounding = ctx.settings, ctx.rounding
        x_learns, _, weight_learns, bias_learns, *_ = ctx.needs_input_grad
        memory = memory_for(gradient)
        padding, strides, dilation, groups = settings
        found = _convolution_backward(
            memory.widen(gradient),
            rounding.raised(x, memory),
            rounding.raised(weight, memory),
            [weight.shape[0]],  # of the bias
            strides, padding, dilation, False, [0] * len(strides), groups,
            [x_learns, weight_learns, bias_learns],
        )  # fmt: skip
        of_x, of_weight, of_bias = [
            None if each is None else rounding.gradient(each, dtype, memory)
            for each, dtype in zip(found, ctx.dtypes, strict=True)
        ]
        memory.free()
        return of_x, None, of_weight, of_bias, None, None, None


# --- prepared weights ------------------------------------------------------------------------------


def _with_prepared(  # noqa: PLR0917  # all there is to one call
    found: Prepared,
    function: Callable[..., Tensor],
    raised: list[Any],
    weight: Tensor,
    settings: ConvolutionSettings,
    dtype: torch.dtype,
) -> Tensor:
    """Returns the convolution of the fp32 ``raised``, input and bias, with a cached weight."""
    x, bias = raised
    padding, strides, dilation, groups = settings
    if not _can_be_laid_out(x, weight, settings):
        values = found.kept(None, lambda values: values, weight)
        return CAST[dtype](function(x, values, bias, strides, padding, dilation, groups))
    # A channels-last convolution in fp32, with the weight in the layout for such inputs: torch's function
    # reorders it in each call. This one sums in another order.
    lay_out = functools.partial(laid_out, settings=settings, shape=x.shape)
    values = found.kept(settings, lay_out, weight)
    return _contiguous(CAST[dtype](convolved(x, values, bias, settings)))


def _can_be_laid_out(x: Tensor, weight: Tensor, settings: ConvolutionSettings) -> bool:
    """Whether `convolved` supports this, as fast as torch's function and with the same layout of results."""
    dimensions = len(settings.strides)
    if not x.dim() == weight.dim() == dimensions + 2 or not x.numel():
        return False
    if weight.shape[1] < _LEAST_CHANNELS or not can_be_laid_out(dimensions):
        return False
    return x.is_contiguous() and weight.is_contiguous()


class Prepared:
    """The cached values of one weight. Keeps the weight's memory alive, so that its address stays unique."""

    __slots__ = ("_kept", "_layout", "_storage", "_version")

    def __init__(self, weight: Tensor) -> None:
        self._storage = weight.untyped_storage()
        self._layout, self._version = _layout(weight), weight._version
        self._kept: dict[Hashable, Tensor] = {}

    def is_of(self, weight: Tensor) -> bool:
        """Whether ``weight``, at this address, has the same layout; drops outdated values."""
        if _layout(weight) != self._layout:
            return False
        version = weight._version
        if version != self._version:
            self._kept, self._version = {}, version
        return True

    def kept(self, key: Hashable, make: Callable[[Tensor], Tensor], weight: Tensor) -> Tensor:
        """Returns the result of ``make`` for the weight in fp32; caches it under ``key``."""
        kept = self._kept
        found = kept.get(key)
        if found is None:
            with torch.inference_mode(False), torch.no_grad():
                found = kept[key] = make(widen(weight))
        return found


def _layout(weight: Tensor) -> tuple[Any, ...]:
    return weight.dtype, weight.shape, weight.stride(), is_in_memory(weight)


#: The address of a weight -> its cached values.
_prepared: Final[dict[int, Prepared]] = {}


def prepare(weights: Iterable[Tensor], owner: nn.Module) -> Callable[[], None]:
    """Makes legalized convolutions in inference cache the fp32 values of these low-precision weights.

    They are created on first use, again after a write that torch counts, and freed with the module that
    owns the weights. A weight that gets other memory is upcast in each call again. Returns a function that ends
    this and frees the cached values.
    """
    mine = {_address(weight): Prepared(weight) for weight in weights if _may_be_prepared(weight)}
    _prepared.update(mine)
    finalizer = weakref.finalize(owner, _forget, mine)
    finalizer.atexit = False
    return finalizer  # once only


def _forget(mine: dict[int, Prepared]) -> None:
    for address, each in mine.items():
        if _prepared.get(address) is each:
            del _prepared[address]


def _may_be_prepared(weight: Tensor) -> bool:
    if type(weight) not in PLAIN_TENSORS or not weight.is_cpu or weight.dtype not in LOW_DTYPES:
        return False
    is_known = weight.dim() > 2 and _numel(weight) >= _LEAST_PREPARED and is_in_memory(weight)
    return is_known and not weight.is_inference()  # it does not count writes


def prepared(weight: Any) -> Prepared | None:
    """Returns the cached values of a weight, or None."""
    if type(weight) not in PLAIN_TENSORS or not weight.is_cpu:
        return None
    found = _prepared.get(_address(weight))
    return found if found is not None and found.is_of(weight) else None
