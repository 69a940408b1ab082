"""Numbers beyond the range of a call's low-precision dtype, within that of float32.

An fp32 program must not fail when it fills ``torch.finfo(torch.float32).min`` into a tensor that an
earlier op has made low-precision; nor may that become -inf, since a softmax of -inf is NaN. Stored numbers
and bounds are clamped to the dtype's range; calls that compute with such a number run in fp32.
"""

from __future__ import annotations

import math
import numbers as abstract
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import has_torch_function

from ..ops import Numbers
from ..patching import unpatched
from ..tensors import CAST, ELIGIBLE, LOW_DTYPES, PLAIN_TENSORS, Args, Kwargs, is_low, leaves
from ..torch_internals import may_learn, transforms
from ..torch_state import is_below_dispatcher, is_off, is_off_by_program, partly_off
from .composition import inputs_of, widen
from .missing_kernels import Callee, in_fp32

# Read before anything is patched.
_clamp, _add, _add_, _empty_like = torch.clamp, torch.add, Tensor.add_, torch.empty_like
_method = vars(torch.autograd.Function)["apply"]
(_apply,) = unpatched(getattr(_method, "__func__", _method))  # since torch 2.14 a C descriptor

#: The largest number of each low-precision dtype; other dtypes are left to torch.
_LARGEST: Final[Mapping[torch.dtype, float]] = {
    **dict.fromkeys((torch.float32, torch.float64), math.inf),
    **{dtype: torch.finfo(dtype).max for dtype in LOW_DTYPES},
}
_LARGEST_IN_FP32: Final = torch.finfo(torch.float32).max

#: Every low-precision dtype holds numbers up to this.
_HELD: Final = min(_LARGEST.values())
_UNHELD: Final = -_HELD

_PLAIN_NUMBERS: Final = frozenset([int, float, bool])
_INFINITE: Final = frozenset([math.inf, -math.inf])


def held(number: Any, dtype: torch.dtype | None) -> Any:
    """Returns ``number``, clamped to a low-precision ``dtype`` if float32 holds it.

    Infinities, NaN and values other than real numbers stay unchanged.
    """
    if not is_low(dtype):
        return number
    if type(number) not in _PLAIN_NUMBERS and not isinstance(number, abstract.Real):
        return number
    if not _LARGEST[dtype] < abs(number) <= _LARGEST_IN_FP32:
        return number
    return math.copysign(_LARGEST[dtype], number)


def finite(tensor: Tensor, low: torch.dtype, dtype: torch.dtype | None = None) -> Tensor:
    """Returns ``tensor`` with its finite numbers clamped to the range of ``low``, maybe in ``dtype``.

    Its gradient is that of a cast.
    """
    dtype = dtype or tensor.dtype
    return (_Finite.apply if may_learn(tensor) else _clamped)(tensor, low, dtype)


def cast_finite(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """Returns ``tensor``, maybe a mask, in a low-precision ``dtype``, without new infinities.

    Parameters are biases of layers, so they are just cast.
    """
    is_bias = isinstance(tensor, Parameter) or tensor.is_nested
    return CAST[dtype](tensor) if is_bias else finite(widen(tensor), dtype, dtype)


class _Finite(torch.autograd.Function):
    drawn_as = "cast"

    generate_vmap_rule = True
    apply: Any = classmethod(_apply)  # the patched one takes three times as long

    @staticmethod
    def forward(tensor: Tensor, low: torch.dtype, dtype: torch.dtype) -> Tensor:
        return _clamped(tensor, low, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.given, ctx.made = inputs[0].dtype, output.dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return CAST[ctx.given](gradient), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *others: None) -> Tensor:
        return CAST[ctx.made](tangent.view_as(tangent))


def _clamped(tensor: Tensor, low: torch.dtype, dtype: torch.dtype) -> Tensor:
    clamped = _clamp(tensor, -_LARGEST[low], _LARGEST[low])
    # This restores infinities, but changes a clamped number by 4 at most.
    alpha = torch.finfo(tensor.dtype).smallest_normal
    if tensor.is_cpu or torch.compiler.is_compiling() or transforms() is not None:
        return CAST[dtype](_add_(clamped, tensor, alpha=alpha))
    result = _empty_like(tensor, dtype=dtype)  # accelerators cast the sum in its kernel
    return _add(clamped, tensor, alpha=alpha, out=result)


def adding_masks(
    original: Callable[..., Any], device_types: frozenset[str], control: Any = None
) -> Callable[..., Any]:
    """Makes an in-place sum keep a wider addend's finite numbers finite in its low-precision target."""

    def add(target: Any, other: Any, *rest: Any, **kwargs: Any) -> Any:
        if control is not None and control.forward is not None:
            return control.forward(target, other, *rest, **kwargs)
        low = target.dtype
        if low in LOW_DTYPES and getattr(other, "dtype", low) is not low and is_cast(target, other):
            other = finite(widen(other), low)
        if rest or kwargs:
            return original(target, other, *rest, **kwargs)
        return original(target, other)

    def is_cast(target: Tensor, other: Any) -> bool:
        if not isinstance(other, Tensor) or not other.dim():
            return False
        is_plain = type(other) in PLAIN_TENSORS or not has_torch_function((other,))
        is_known = is_plain and other.dtype in ELIGIBLE and target.device.type in device_types
        return is_known and not (is_below_dispatcher() or _is_off(target.device.type))

    return add


def taking_numbers(
    original: Callable[..., Any],
    numbers: Numbers,
    promotes: bool,
    complete: Callable[..., Any],
    control: Any = None,
) -> Callable[..., Any]:
    """Returns a function that calls torch's ``original`` if the dtype holds its numbers, else ``complete``.

    With ``promotes`` its kernel accepts mixed dtypes, so the first argument does not decide. If the ``forward``
    of ``control`` is not None, it gets all calls.
    """
    first = min(numbers.positions, default=sys.maxsize)

    def take(*args: Any, **kwargs: Any) -> Any:
        if control is not None and control.forward is not None:
            return control.forward(*args, **kwargs)
        for value in (*args[first:], *kwargs.values()) if kwargs else args[first:]:
            kind = type(value)
            if kind in _PLAIN_NUMBERS:
                if _UNHELD <= value <= _HELD or value in _INFINITE:
                    continue
                if not promotes and args and type(args[0]) in PLAIN_TENSORS:
                    largest = _LARGEST.get(args[0].dtype)
                    if largest is not None and -largest <= value <= largest:
                        continue
            elif value is None or (kind in PLAIN_TENSORS and value.dim()):
                continue
            return complete(*args, **kwargs)
        return original(*args, **kwargs)

    return take


def completed_by_numbers(
    callee: Callee, numbers: Numbers, device_types: frozenset[str]
) -> Callable[..., Any]:
    """Makes torch's function accept numbers that the low-precision dtype of its tensor, on these devices, does not hold."""
    function = callee.function

    def complete(*args: Any, **kwargs: Any) -> Any:
        tensor = _deciding(callee, args, kwargs)
        if tensor is None or is_below_dispatcher():
            return function(*args, **kwargs)
        dtype = kwargs.get("dtype") or tensor.dtype
        device_type = tensor.device.type
        if not is_low(dtype) or device_type not in device_types or _is_off(device_type):
            return function(*args, **kwargs)
        if numbers.are_factors:
            given = [value for p, value in enumerate(args) if p in numbers.positions]
            given += [value for name, value in kwargs.items() if name in numbers.names]
            if all([held(value, dtype) is value for value in leaves(given)]):  # noqa: C419
                return function(*args, **kwargs)
            return in_fp32(callee, args, kwargs, dtype)

        # A kernel that promotes does not treat 0-dim tensors among 0-dim tensors as numbers.
        has_numbers = not callee.promotes or tensor.dim() > 0

        def taken(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return [held(item, dtype) for item in value]
            if not isinstance(value, Tensor):
                return held(value, dtype)
            is_number = has_numbers and not value.dim() and value.dtype is not dtype
            if not is_number or value.is_complex():
                return value
            return finite(_wide(value), dtype, dtype)

        positional = [taken(v) if p in numbers.positions else v for p, v in enumerate(args)]
        named = {name: taken(v) if name in numbers.names else v for name, v in kwargs.items()}
        return function(*positional, **named)

    return complete


def _is_off(device_type: str) -> bool:
    if is_off():  # inside an op implemented in Python, by hmpx
        return torch.compiler.is_dynamo_compiling() or is_off_by_program()
    return device_type in partly_off()


def _deciding(callee: Callee, args: Args, kwargs: Kwargs) -> Tensor | None:
    """Returns the tensor to whose dtype torch converts numbers, or None."""
    if not callee.promotes:
        inputs = inputs_of(args, kwargs)
        return None if inputs is None else inputs.first
    values = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    floating = [tensor for tensor in values if tensor.is_floating_point()]
    dimensioned = [tensor for tensor in floating if tensor.dim()] or floating
    if any([tensor.dtype not in LOW_DTYPES for tensor in dimensioned]):  # noqa: C419
        return None
    return dimensioned[0] if len({tensor.dtype for tensor in dimensioned}) == 1 else None


def _wide(number: Tensor) -> Tensor:
    return number if number.dtype is torch.float64 else widen(number)
