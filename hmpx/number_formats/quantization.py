"""Rounding tensors to number formats, with or without autograd."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ..errors import OptionError, shown
from ..torch_internals import is_batch, is_gradient_batch, may_learn, one_of_batch
from .families import Format, Rounder
from .registered import get
from .rounding import Rounding, rounding_of


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
