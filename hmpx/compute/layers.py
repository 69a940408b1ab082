"""Legalized layers: convolutions in reused fp32 memory, linear layers of few rows.

The rounding points are those of `casting.legalized`, and autograd saves low-precision tensors. A linear layer's
weights are rounded while they are read, once: its sums have another order.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from ..number_formats import bfloat16_kernels
from ..tensors import CAST, Args, Kwargs, is_in_memory
from ..torch_internals import dispatch_modes, has_fake_tensors, has_tangents, is_batch, transforms
from .composition import call_raised, rounded, widen, widen_matrices
from .watching import EMULATION_WATCHERS

if TYPE_CHECKING:
    from ..number_formats import Bfloat16Kernels

# Read before anything is patched: op lists may name any of them.
_as_strided, _copy_, _view = Tensor.as_strided, Tensor.copy_, Tensor.view
_empty, _empty_like, _empty_strided = torch.empty, torch.empty_like, torch.empty_strided

_MOST: Final = 1 << 26  # elements that a thread keeps: 256 MiB
_LINE: Final = 16  # elements in a cache line

_thread: Final = threading.local()  # .memory; None while a call uses it


class New:
    """New fp32 tensors, which others, such as autograd, may see."""

    __slots__ = ()

    widen = staticmethod(widen)

    def rounded(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return widen(CAST[dtype](tensor))

    def round_(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns an fp32 tensor, which may be written to, with values of the low-precision ``dtype``."""
        return self.rounded(tensor, dtype)

    def free(self) -> None:
        """Does nothing: no memory is reused."""


class Temporaries(New):
    """The fp32 tensors of one call, in reused memory; none may be used after `free`.

    Nested calls, and tensors that do not fit, get fresh memory, so tensors in use never share memory.
    """

    __slots__ = ("_device", "_memory", "_used")

    def __init__(self, device: torch.device) -> None:
        self._device, self._used = device, 0
        self._memory: Tensor | None = None
        if device.type == "cpu":  # elsewhere torch reuses memory itself
            self._memory = getattr(_thread, "memory", None)
            _thread.memory = None

    def free(self) -> None:
        """Returns the memory to the thread, enlarged if this call needed more."""
        if self._device.type != "cpu":
            return
        size = min(self._used, _MOST)
        if self._memory is None or self._memory.numel() < size:
            with torch.inference_mode(False):
                self._memory = _empty(size, dtype=torch.float32, device=self._device)
        _thread.memory = self._memory

    def empty(self, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
        """Returns a new tensor; ``strides`` must be those of a dense tensor."""
        start = self._take(math.prod(shape))
        if start is None or self._memory is None:
            return _empty_strided(shape, strides, dtype=torch.float32, device=self._device)
        return _as_strided(self._memory, shape, strides, start)

    def widen(self, tensor: Tensor) -> Tensor:
        return _copy_(self.empty(tensor.shape, _dense_strides(tensor)), tensor)

    def rounded(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return self._round(tensor, self.empty(tensor.shape, _dense_strides(tensor)), dtype)

    def round_(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Rounds a dense fp32 tensor in place."""
        return self._round(tensor, tensor, dtype)

    def _round(self, tensor: Tensor, output: Tensor, dtype: torch.dtype) -> Tensor:
        if round_in_one_pass(tensor, output, dtype):
            return output
        dense = _dense_strides(tensor)
        start = self._take((tensor.numel() + 1) // 2)
        if start is not None and self._memory is not None:
            memory = _view(self._memory, dtype)
            low = _copy_(_as_strided(memory, tensor.shape, dense, 2 * start), tensor)
        else:
            low = CAST[dtype](tensor)
        return _copy_(output, low)

    def _take(self, size: int) -> int | None:
        """Returns the start of memory for this number of elements; None if it does not fit."""
        start, memory = self._used, self._memory
        self._used = start + (size + _LINE - 1) // _LINE * _LINE
        return start if memory is not None and self._used <= memory.numel() else None


def is_seen() -> bool:
    """Whether a mode may keep tensors, or a transform wraps them."""
    return bool(dispatch_modes()) or transforms() is not None


def memory_for(gradient: Tensor) -> New:
    """Returns the memory for a backward: new tensors if others may see them."""
    if torch.is_grad_enabled() or is_batch(gradient) or is_seen():
        return New()
    return Temporaries(gradient.device)


def in_reused_memory(
    function: Callable[..., Any], args: Args, kwargs: Kwargs, dtype: torch.dtype
) -> Any:
    """Returns a product without recording gradients, with upcast inputs in reused memory; the result is new."""
    if is_seen() or has_tangents():
        return rounded(call_raised(function, args, kwargs, widen_matrices), CAST[dtype])
    memory = Temporaries(torch.device("cpu"))

    def raised(tensor: Tensor) -> Tensor:
        is_plain = tensor.dim() < 3 or tensor.is_contiguous()
        return memory.widen(tensor) if is_plain and tensor.is_cpu else widen_matrices(tensor)

    result = call_raised(function, args, kwargs, raised)
    memory.free()
    return rounded(result, CAST[dtype])


@dataclass(frozen=True, slots=True)
class Rounding:
    """How the inputs and gradients of a product with a weight are rounded."""

    dtype: torch.dtype  # the low-precision dtype
    rounds_inputs: bool  # fp32 inputs are rounded first

    def raised(self, tensor: Tensor, memory: New) -> Tensor:
        if tensor.dtype is not torch.float32:
            return memory.widen(tensor)
        return memory.rounded(tensor, self.dtype) if self.rounds_inputs else tensor

    def gradient(self, gradient: Tensor, dtype: torch.dtype, memory: New) -> Tensor:
        """Returns the outgoing gradient of an input of ``dtype``; may write to the fp32 one."""
        if dtype is not torch.float32:
            return CAST[dtype](gradient)
        return memory.round_(gradient, self.dtype) if self.rounds_inputs else gradient


def round_in_one_pass(source: Tensor, target: Tensor, dtype: torch.dtype) -> bool:
    """Writes ``source``, rounded to ``dtype``, to the fp32 ``target``; returns False without a kernel."""
    if not source.stride() == target.stride() == _dense_strides(source):
        return False
    kernels = kernels_for(source, dtype)
    if kernels is None:
        return False
    kernels.round(source, target)
    return True


def kernels_for(source: Tensor, dtype: torch.dtype) -> Bfloat16Kernels | None:
    if source.dtype is not torch.float32 or dtype is not torch.bfloat16 or not source.is_cpu:
        return None
    return bfloat16_kernels() if is_in_memory(source) else None


def _dense_strides(tensor: Tensor) -> Sequence[int]:
    """Returns the strides for a copy of ``tensor``: its own if it has no gaps."""
    if tensor.is_contiguous():
        return tensor.stride()
    return _empty_like(tensor, device="meta").stride()


_add_, _new_empty, _numel = Tensor.add_, Tensor.new_empty, Tensor.numel
_reshape, _t = Tensor.reshape, Tensor.t
_mm, _sum = torch.mm, torch.sum
_convolution_backward = torch.ops.aten.convolution_backward.default

#: The ops that `convolution` supports -> their number of spatial dimensions.
CONVOLUTIONS: Final = {"conv1d": 1, "conv2d": 2, "conv3d": 3}

#: Elements of an input or a weight. Below this, fresh memory costs less than the bookkeeping of convolutions, and
#: weights of linear layers are read as fast twice.
LEAST: Final = 1 << 17


def is_large(x: Any, weight: Any) -> bool:
    """Whether `convolution` is faster for a convolution of ``x`` with ``weight``."""
    try:
        return bool(_numel(x) >= LEAST or _numel(weight) >= LEAST)
    except TypeError:  # one is not a tensor
        return False


def convolution(
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
    if settings is None or not is_large(x, weight):
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


#: Strides, padding and dilation, one number for each dimension, and the groups.
_Settings = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]


def _settings(dimensions: int, given: Args) -> _Settings | None:
    """Returns a convolution's settings; None if they are strings, or too short."""
    if len(given) > 4:
        return None
    values: list[Any] = [*given, *(1, 0, 1, 1)[len(given) :]]
    groups = values.pop()
    lists = [(value,) * dimensions if type(value) is int else value for value in values]
    if not all([isinstance(each, (list, tuple)) and len(each) == dimensions for each in lists]):  # noqa: C419
        return None
    strides, padding, dilation = map(tuple, lists)
    return strides, padding, dilation, groups


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
        settings: _Settings,
        rounding: Rounding,
    ) -> Tensor:
        ctx.save_for_backward(x if kept is None else kept, weight)
        ctx.settings, ctx.rounding = settings, rounding
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        memory = Temporaries(x.device)
        raised = [None if t is None else rounding.raised(t, memory) for t in (x, weight, bias)]
        result = CAST[rounding.dtype](function(*raised, *settings))
        memory.free()
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        settings, rounding = ctx.settings, ctx.rounding
        x_learns, _, weight_learns, bias_learns, *_ = ctx.needs_input_grad
        memory = memory_for(gradient)
        strides, padding, dilation, groups = settings
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


FEW_ROWS: Final = 2  # with so few, reading the weights dominates


def is_read_once(x: Any, weight: Any, dtype: torch.dtype) -> bool:
    """Whether `linear` rounds a layer's weight while it multiplies it by `FEW_ROWS` or fewer."""
    if type(weight) is not nn.Parameter or weight.dtype is not torch.float32:
        return False
    if not isinstance(x, Tensor) or x.dim() < 2 or x.is_nested:
        return False
    if not 0 < _numel(x) <= FEW_ROWS * x.shape[-1]:
        return False
    return _numel(weight) >= LEAST and kernels_for(weight, dtype) is not None


def linear(args: Args, dtype: torch.dtype) -> Tensor | None:
    """Returns the output of a linear layer in ``dtype``, to which its inputs are rounded; None unless `is_read_once`.

    Of ``args`` (input, weight and perhaps bias) fp32 ones may be cast already.
    """
    layer = _layer(args, dtype)
    if layer is None or not is_read_once(*layer[:2], dtype):
        return None
    x, weight, bias = layer
    if EMULATION_WATCHERS or (dispatch_modes() and has_fake_tensors()):
        return None  # the kernel's rounding would not be seen
    if bias is not None and bias.dtype is torch.float32 and not isinstance(bias, nn.Parameter):
        return None
    apply: Callable[..., Tensor] = _Linear.apply
    return apply(CAST[dtype](x) if x.dtype is torch.float32 else x, weight, bias, dtype)


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
    return None if has_tangents() or transforms() is not None else (x, weight, bias)


class _Linear(torch.autograd.Function):
    """x @ weight.T + bias."""

    drawn_as = "linear"

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [..., k]: low
        weight: Tensor,  # [n, k]: a parameter, rounded in the backward again
        bias: Tensor | None,  # [n]: low, or a parameter
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dtype, ctx.of_bias = dtype, None if bias is None else bias.dtype
        kernels = kernels_for(weight, dtype)
        assert kernels is not None  # see `is_read_once`
        product = _new_empty(weight, (*x.shape[:-1], weight.shape[0]))
        kernels.multiply(widen(x), weight, product)
        if bias is not None:
            _add_(product, widen(CAST[dtype](bias)))
        return CAST[dtype](product)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), low = ctx.saved_tensors, CAST[ctx.dtype]
        n, k = weight.shape
        wide = _reshape(widen(gradient), (-1, n))
        x_learns, weight_learns, bias_learns, _ = ctx.needs_input_grad
        found: list[Tensor | None] = [None, None, None]
        if x_learns:
            found[0] = _reshape(low(_mm(wide, widen(low(weight)))), x.shape)
        if weight_learns:
            found[1] = widen(low(_mm(_t(wide), widen(_reshape(x, (-1, k))))))
        if bias_learns:
            found[2] = CAST[ctx.of_bias](low(_sum(wide, 0)))
        return *found, None
