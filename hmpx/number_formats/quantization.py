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

    Rounds once: float64 is not rounded to float32 first. Where ``x``'s dtype lacks values of the
    format (float16 numbers in bfloat16), the result is rounded to that dtype, too. NaN stays NaN,
    even if the format has none. Gradients pass unchanged, as if nothing had been rounded. Where
    every value of the dtype is one of the format, ``x`` itself is returned, as by `Tensor.to`.

    Args:
        x: float32, float64, bfloat16 or float16; on any device; dense, of any strides.
        format: A format, or what `get` takes for one.
        rounding: ``"nearest"`` (ties to even), ``"nearest_away"`` (ties away from zero),
            ``"toward_zero"``, ``"up"``, ``"down"``, or ``"stochastic"``: to one of the neighbours,
            by chance in proportion to how near they are.
        overflow: What becomes of values beyond the largest: ``"saturate"``, ``"inf"`` or ``"nan"``,
            if the format has them; None: what its standard says.
        generator: Gives ``"stochastic"`` its seed; None: torch's own. One draw a call.
        scale: For a `Scaled` format: its scales, such as `Scaled.scale` makes of the largest magnitudes of
            earlier tensors, instead of those of ``x``; of the shape of `Scaled.amax`. With
            ``tensor_scale`` the tensor's; blocks have their own even so. What is beyond the largest
            element saturates, infinities too.

    Raises:
        OptionError: There is no such format, or it can't be rounded to in this way, or ``x`` is not a
            tensor of these dtypes, or ``scale`` not as the format has them; or ``HMPX_KERNELS`` is wrong.

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
        run = Rounding(get(format), rounding, overflow)  # its arguments are checked at trace time
        function: type[_StraightThrough] = _StraightThrough  # dynamo knows no jvp
    elif is_batch(x) and torch.is_grad_enabled() and is_gradient_batch(x):
        args = format, rounding, overflow, generator  # it hides whether gradients are recorded
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
    """Returns the function that rounds a tensor as `quantize` does, but has no gradient.

    Made once and called often: nothing is looked up by name in a call.

    Raises:
        OptionError: There is no such format, or it can't be rounded to in this way; or
            ``HMPX_KERNELS`` is wrong.
    """
    run = rounding_of(get(format), rounding, overflow)
    if generator is None:
        return run
    return lambda x: run(x, generator)


def rounds_nothing(format: Format) -> bool:
    """Whether every value of float32 is one of the format."""
    return format.own_function is None and format.plan(torch.float32, "nearest", None) is None


class _StraightThrough(torch.autograd.Function):
    """Rounds; gradients pass."""

    drawn_as = "cast"

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, run: Rounding, generator: torch.Generator | None, scale: Tensor | None
    ) -> Tensor:
        rounded = run(x, generator, scale)
        return x.view_as(x) if rounded is x else rounded

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keeps nothing."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient, None, None, None


class _ForwardToo(_StraightThrough):
    """The same, in forward mode, too."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *others: None) -> Tensor:
        return tangent.view_as(tangent)
