"""Rounding under autograd: gradients pass as if nothing had been rounded, or are rounded themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..number_formats import Rounder
from ..torch_internals import has_tangents, is_gradient_batch, may_learn, one_of_batch

_clone = torch.Tensor.clone


def straight_through(
    tensor: Tensor, round_: Rounder | None, round_gradient: Rounder | None = None
) -> Tensor:
    """Returns ``tensor`` rounded; its gradient is rounded by ``round_gradient``.

    Args:
        tensor: The values.
        round_: Rounds them, without a gradient; None leaves them as they are.
        round_gradient: Rounds their gradient, and that one's gradient; None lets gradients pass.
    """
    if round_ is None and round_gradient is None:
        return tensor
    if may_learn(tensor):
        return _Rounded.apply(tensor, round_, round_gradient)  # type: ignore[no-any-return, no-untyped-call]
    if torch.is_grad_enabled() and is_gradient_batch(
        tensor
    ):  # it hides whether gradients are recorded
        return one_of_batch(lambda each: straight_through(each, round_, round_gradient), tensor)
    return tensor if round_ is None else round_(tensor)


class _Rounded(torch.autograd.Function):
    """Rounds values, and gradients if requested."""

    drawn_as = "cast"

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, round_: Rounder | None, round_gradient: Rounder | None) -> Tensor:
        result = tensor if round_ is None else round_(tensor)
        if result is not tensor:
            return result
        # The tangent of a view has to be a view, which a rounded one is not.
        is_copied = round_gradient is not None and has_tangents()
        return _clone(tensor) if is_copied else tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.round = inputs[2]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.round is None:
            return gradient, None, None
        # With create_graph=True the gradient's own gradient is rounded, too.
        return straight_through(gradient, ctx.round, ctx.round), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *others: None) -> Tensor:
        if ctx.round is None:
            return tangent.view_as(tangent)
        return straight_through(tangent, ctx.round, ctx.round)
