"""Rounding to number formats in calls: under autograd, and with a warning of what overflows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..number_formats import Format, Rounder
from ..patching import unpatched
from ..tensors import PLAIN_TENSORS
from ..torch_internals import (
    dispatch_modes,
    has_tangents,
    is_gradient_batch,
    may_learn,
    one_of_batch,
    transforms,
)
from ..torch_state import in_force, place, without_casts
from ..warning import warn

# As they are where nothing is patched: op lists may name any of them.
_sum, _isfinite, _and, _not = unpatched(
    torch.sum, torch.isfinite, torch.logical_and, torch.logical_not
)
_where, _abs, _amax = unpatched(torch.where, torch.abs, torch.amax)
_clone = torch.Tensor.clone


def straight_through(
    tensor: Tensor, round_: Rounder | None, round_gradient: Rounder | None = None
) -> Tensor:
    """Returns ``tensor`` rounded by ``round_``; its gradient, and that one's, by ``round_gradient``.

    None for either leaves the values, or the gradients, as they are.
    """
    if round_ is None and round_gradient is None:
        return tensor
    if may_learn(tensor):
        return _Rounded.apply(tensor, round_, round_gradient)  # type: ignore[no-any-return, no-untyped-call]
    # A batch of gradients hides whether gradients are recorded.
    if torch.is_grad_enabled() and is_gradient_batch(tensor):
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


# --- values that overflow ---------------------------------------------------------------------------

#: The conversion that has been warned of.
_warned: object = None


def may_overflow(format: Format, overflow: str | None) -> bool:
    """Whether values beyond the format's largest become infinite or NaN."""
    return (overflow or format.default_overflow) != "saturate"


def warning_of_overflow(round_: Rounder, format: Format, op: str, what: str, line: str) -> Rounder:
    """Returns ``round_`` with one warning of a conversion where it makes finite values infinite or NaN.

    On the CPU only: to look at values elsewhere would wait for the device. It looks at the sum of what was
    rounded, in a tenth to a third of the time of rounding; `hmpx.watch` looks everywhere.

    Args:
        round_: Rounds to the format.
        format: The format.
        op: The op whose values these are.
        what: Which they are: ``"an input"``.
        line: Where the op's decision comes from.
    """

    def round_and_look(tensor: Tensor) -> Tensor:
        global _warned
        result = round_(tensor)
        if torch.compiler.is_dynamo_compiling():
            return result
        if (
            type(result) in PLAIN_TENSORS
            and result.is_cpu
            and _warned is not in_force()
            and not dispatch_modes()
            and transforms() is None
            and not math.isfinite(_sum(result).item())  # NaN and infinity stay in a sum
        ):
            most = _largest_lost(tensor, result)
            if most is not None:
                _warned = in_force()
                warn(_message(format, op, what, line, most))
        return result

    return round_and_look


def _largest_lost(tensor: Tensor, result: Tensor) -> float | None:
    """Returns the largest magnitude that was finite and is not any more; None if there is none."""
    with torch.no_grad(), without_casts():
        is_lost = _and(_isfinite(tensor), _not(_isfinite(result)))
        if not is_lost.any().item():
            return None
        return float(_amax(_abs(_where(is_lost, tensor, 0.0))).item())


def _message(format: Format, op: str, what: str, line: str, most: float) -> str:
    module = place().path
    limit = f", whose largest is {format.max:g}," if hasattr(format, "max") else ""
    return (
        f"{op}{f' in {module}' if module else ''}: {what} of {most:.4g} is beyond {format.name}{limit} and "
        'became infinite or NaN; convert(overflow="saturate"), or overflow=saturate on the op\'s line '
        f"({line or 'a rule'}), keeps the largest value instead. Said once"
    )
