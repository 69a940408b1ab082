"""Products whose factors are rounded for each product anew: in the forward, and for each gradient.

Blocks and rows share a scale along the dimension that a product reduces over, as the hardware's
instructions take them. The product of the forward and those of the backward reduce over different
dimensions of the same factors, so each rounds the original factors its own way. Which formats those
are is for `emulation`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..number_formats import Format, Rounder
from ..torch_internals import each_of_batch, is_gradient_batch, may_learn
from .factored import Multiplication
from .straight_through import straight_through

#: Returns what rounds along an axis; None for the format's own.
ByAxis: TypeAlias = Callable[[int | None], Rounder]


def has_axis(format: Format) -> bool:
    """Whether values that lie along an axis are rounded together."""
    return format.block_axis is not None


@dataclass(frozen=True, eq=False)
class EmulatedProduct:
    """A product, and how its factors are rounded.

    Attributes:
        multiplication: The product, and the gradients of its factors.
        rounders: For each factor what rounds it; None where it is rounded already, in the same way
            for all products.
        gradient: What rounds the result's gradient for the products of the backward; None computes
            gradients in full precision, of what the forward has rounded.
    """

    multiplication: Multiplication
    rounders: tuple[ByAxis | None, ...]
    gradient: ByAxis | None

    def compute(self, factors: Sequence[Tensor]) -> Tensor:
        """Returns the product of the rounded factors."""
        if self.gradient is None or not may_learn(*factors):
            return self.multiplication.multiply(self.rounded(factors))
        return _Product.apply(self, *factors)  # type: ignore[no-any-return, no-untyped-call]

    def rounded(self, factors: Sequence[Tensor], target: int | None = None) -> list[Tensor]:
        """Returns the factors as a product takes them: the forward's, or that of a gradient."""
        axes = self.multiplication.contraction.axes(target)
        return [
            factor if by_axis is None or i == target else straight_through(factor, by_axis(axes[i]))
            for i, (factor, by_axis) in enumerate(zip(factors, self.rounders, strict=True))
        ]

    def gradient_of(self, target: int, factors: Sequence[Tensor], gradient: Tensor) -> Tensor:
        """Returns the gradient of a factor, itself not rounded."""
        assert self.gradient is not None
        round_ = self.gradient(self.multiplication.contraction.axes(target)[-1])
        rounded = straight_through(gradient, round_, round_)
        return self.multiplication.gradient(target, self.rounded(factors, target), rounded)

    def rounded_tangent(self, tangent: Tensor, axis: int | None) -> Tensor:
        """Returns a factor's tangent, rounded along the axis that the product sums over."""
        assert self.gradient is not None
        round_ = self.gradient(axis)
        return straight_through(tangent, round_, round_)


class _Product(torch.autograd.Function):
    """The product, with gradients that are products of rounded values, too."""

    drawn_as = "matmul"

    generate_vmap_rule = True

    @staticmethod
    def forward(product: EmulatedProduct, *factors: Tensor) -> Tensor:
        return product.multiplication.multiply(product.rounded(factors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.product, *factors = inputs
        ctx.save_for_backward(*factors)
        ctx.save_for_forward(*factors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        product, factors = ctx.product, ctx.saved_tensors

        def gradients(gradient: Tensor) -> tuple[Tensor | None, ...]:
            return tuple(
                [
                    product.gradient_of(target, factors, gradient) if is_needed else None
                    for target, is_needed in enumerate(ctx.needs_input_grad[1:])
                ]
            )

        if is_gradient_batch(gradient):  # which torch.einsum does not take
            return None, *each_of_batch(gradients, gradient)
        return None, *gradients(gradient)

    @staticmethod
    def jvp(ctx: Any, product: None, *tangents: Tensor | None) -> Tensor:
        rounded = ctx.product.rounded(ctx.saved_tensors)
        axes = ctx.product.multiplication.contraction.axes()
        terms = [
            ctx.product.multiplication.multiply(
                [*rounded[:i], ctx.product.rounded_tangent(tangent, axes[i]), *rounded[i + 1 :]]
            )
            for i, tangent in enumerate(tangents)
            if tangent is not None
        ]
        return torch.stack(terms).sum(0)
