"""Products whose factors are rounded separately for each product: the forward and each gradient.

Blocks and rows share a scale along the reduced dimension, as in hardware instructions. The products of the
forward and the backward reduce over different dimensions of the same factors, so each rounds the original
factors separately.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from ..number_formats import Format, Rounder
from ..ops import Product, parameter_named, product
from ..patching import unpatched
from ..tensors import SEQUENCES, Args, Kwargs
from ..torch_internals import HAS_OPERATORS, each_of_batch, is_gradient_batch, may_learn
from . import contractions
from .contractions import Contraction
from .rounding import straight_through

# Unpatched: op lists may name any of them.
_mul, _add, _expand, _unsqueeze = unpatched(torch.mul, torch.add, Tensor.expand, Tensor.unsqueeze)
_squeeze, _reshape, _pad, _convolution = unpatched(
    Tensor.squeeze,
    Tensor.reshape,
    torch.constant_pad_nd,
    torch.convolution,
)
_aten: Any = torch.ops.aten if HAS_OPERATORS else None  # else `convert` raises an error
_einsum: Any = getattr(_aten, "einsum", None)
_convolution_backward: Any = getattr(_aten, "convolution_backward", None)

#: Returns the function that rounds along an axis; None for the format's own axis.
ByAxis: TypeAlias = Callable[[int | None], Rounder]

#: Returns a call's arguments with other factors.
_Replace: TypeAlias = Callable[[Sequence[Tensor]], tuple[Args, Kwargs]]


def has_axis(format: Format) -> bool:
    """Whether values along an axis are rounded together."""
    return format.block_axis is not None


@dataclass(frozen=True, eq=False)
class Multiplication:
    """How to multiply factors, and to compute the gradient of each."""

    contraction: Contraction  # the factors' dimensions
    function: Callable[[Sequence[Tensor]], Tensor] | None = None  # None: like `torch.einsum`
    convolution: tuple[Any, ...] | None = None  # the settings, if `torch.convolution` multiplies

    def multiply(self, factors: Sequence[Tensor]) -> Tensor:
        """Returns the product."""
        if self.convolution is not None:
            value, weight = factors
            return _convolution(value, weight, None, *self.convolution)
        if self.function is not None:
            return self.function(factors)
        found: Tensor = _einsum(self.contraction.equation()[0], list(factors))
        return found

    def gradient(self, target: int, factors: Sequence[Tensor], gradient: Tensor) -> Tensor:
        """Returns the gradient of a factor, of which only the shape is used."""
        if self.convolution is not None:
            mask = [target == 0, target == 1, False]
            found = _convolution_backward(gradient, *factors, None, *self.convolution, mask)
            return found[target]  # type: ignore[no-any-return]
        equation, kept = self.contraction.equation(target)
        others = [factor for i, factor in enumerate(factors) if i != target]
        found = _einsum(equation, [gradient, *others])
        for axis, letter in enumerate(self.contraction.factors[target]):
            if letter not in kept:
                found = _unsqueeze(found, axis)
        return _expand(found, factors[target].shape)


@dataclass(frozen=True, eq=False)
class EmulatedProduct:
    """A product, and how its factors are rounded."""

    multiplication: Multiplication  # the product, and the gradients of its factors
    rounders: tuple[ByAxis | None, ...]  # each factor's; None if it is already rounded
    #: Rounds the result's gradient for the products of the backward; None computes gradients in full precision,
    #: from the forward's rounded values.
    gradient: ByAxis | None

    def compute(self, factors: Sequence[Tensor]) -> Tensor:
        """Returns the product of the rounded factors."""
        if self.gradient is None or not may_learn(*factors):
            return self.multiplication.multiply(self.rounded(factors))
        return _Product.apply(self, *factors)  # type: ignore[no-any-return, no-untyped-call]

    def rounded(self, factors: Sequence[Tensor], target: int | None = None) -> list[Tensor]:
        """Returns the factors rounded for the forward's product, or for that of a gradient."""
        axes = self.multiplication.contraction.axes(target)
        return [
            factor if by_axis is None or i == target else straight_through(factor, by_axis(axes[i]))
            for i, (factor, by_axis) in enumerate(zip(factors, self.rounders, strict=True))
        ]

    def gradient_of(self, target: int, factors: Sequence[Tensor], gradient: Tensor) -> Tensor:
        """Returns the unrounded gradient of a factor."""
        axis = self.multiplication.contraction.axes(target)[-1]
        rounded = self.rounded_gradient(gradient, axis)
        return self.multiplication.gradient(target, self.rounded(factors, target), rounded)

    def rounded_gradient(self, gradient: Tensor, axis: int | None) -> Tensor:
        """Returns a gradient, or a tangent, rounded along the axis over which a product sums."""
        assert self.gradient is not None
        round_ = self.gradient(axis)
        return straight_through(gradient, round_, round_)


class _Product(torch.autograd.Function):
    """The product; its gradients are also products of rounded values."""

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

        if is_gradient_batch(gradient):  # torch.einsum does not accept it
            return None, *each_of_batch(gradients, gradient)
        return None, *gradients(gradient)

    @staticmethod
    def jvp(ctx: Any, product: None, *tangents: Tensor | None) -> Tensor:
        multiplication, rounded = ctx.product.multiplication, ctx.product.rounded(ctx.saved_tensors)
        axes = multiplication.contraction.axes()
        terms = [
            multiplication.multiply(
                [*rounded[:i], ctx.product.rounded_gradient(tangent, axes[i]), *rounded[i + 1 :]]
            )
            for i, tangent in enumerate(tangents)
            if tangent is not None
        ]
        return torch.stack(terms).sum(0)


# --- decomposed calls ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Factored:
    """A decomposed call of a product."""

    names: tuple[str, ...]  # names of the arguments that are factors
    factors: tuple[Tensor, ...]  # their values
    multiplication: Multiplication  # how they are multiplied
    finish: Callable[[Tensor], Tensor]  # converts the product to the call's result
    replace: _Replace  # returns the call's arguments with other factors


def may_be_factored(op: str) -> bool:
    """Whether calls of ``op`` can be decomposed."""
    return op in _OF_ARGUMENTS or product(op) is not None


def factored(
    op: str, names: tuple[str, ...], function: Callable[..., Any], args: Args, kwargs: Kwargs
) -> Factored | None:
    """Returns the decomposed call of torch's function for ``op``; None if unsupported."""
    if op in _OF_ARGUMENTS:
        return _of_arguments(op, function, args, kwargs)
    known = product(op)
    if known is None or len(args) > len(names):
        return None
    given = dict(zip(names, args, strict=False))
    given |= {parameter_named(name, names): value for name, value in kwargs.items()}
    factors: tuple[Any, ...] = tuple([given.get(name) for name in known.names])
    if not _are_tensors(factors):
        return None

    def replace(new: Sequence[Tensor], **others: None) -> tuple[Args, Kwargs]:
        changed = {**dict(zip(known.names, new, strict=True)), **others}
        new_args = [changed.get(name, value) for name, value in zip(names, args, strict=False)]
        return tuple(new_args), {
            name: changed.get(parameter_named(name, names), value) for name, value in kwargs.items()
        }

    if known.is_convolution:
        return _convolved(known, factors, given, replace)
    found = contractions.contraction(known, factors)
    addend = given.get(known.addend) if known.addend else None
    if found is None or given.get("out_dtype") is not None:
        return None

    def call(new: Sequence[Tensor]) -> Tensor:
        new_args, new_kwargs = replace(new, **({known.addend: None} if known.addend else {}))
        return function(*new_args, **new_kwargs)  # type: ignore[no-any-return]

    is_bias = known.addend in (None, "bias")
    return Factored(
        known.names,
        factors,
        Multiplication(found, call if is_bias else None),
        lambda result: _scaled_sum(result, given.get("alpha", 1), addend, given.get("beta", 1)),
        replace,
    )


def _scaled_sum(result: Tensor, alpha: Any, addend: Any, beta: Any) -> Tensor:
    if alpha != 1:
        result = _mul(result, alpha)
    if addend is None or beta == 0:
        return result
    return _add(result, addend if beta == 1 else _mul(addend, beta))


def _convolved(
    known: Product, factors: Sequence[Any], given: Mapping[str, Any], replace: _Replace
) -> Factored | None:
    value, weight = factors
    dims = weight.dim() - 2
    if dims < 1 or value.dim() not in (dims + 1, dims + 2):
        return None
    is_batch = value.dim() == dims + 2
    stride, dilation = (_each(given.get(name, 1), dims) for name in ("stride", "dilation"))
    padding = given.get("padding", 0)
    missing = [0] * dims
    if padding == "same":
        totals = [d * (size - 1) for d, size in zip(dilation, weight.shape[2:], strict=True)]
        padding, missing = [total // 2 for total in totals], [total % 2 for total in totals]
    elif padding == "valid":
        padding = 0
    is_transposed = "co" in known.letters[1]
    settings = (
        stride, _each(padding, dims), dilation, is_transposed,
        _each(given.get("output_padding", 0), dims), given.get("groups", 1),
    )  # fmt: skip
    if not is_batch:
        value = _unsqueeze(value, 0)
    if any(missing):  # like torch: odd padding goes to the end
        value = _pad(value, [each for size in reversed(missing) for each in (0, size)])
    found = contractions.contraction(known, (value, weight))
    if found is None:
        return None
    bias = given.get(known.addend or "")

    def finish(result: Tensor) -> Tensor:
        if bias is not None:
            result = _add(result, _reshape(bias, (-1, *[1] * dims)))
        return result if is_batch else _squeeze(result, 0)

    def replace_unpadded(new: Sequence[Tensor]) -> tuple[Args, Kwargs]:
        value = new[0] if is_batch else _squeeze(new[0], 0)
        for axis, size in enumerate(reversed(missing), start=1):
            value = value.narrow(-axis, 0, value.shape[-axis] - size)
        return replace((value, new[1]))

    multiplication = Multiplication(found, convolution=settings)
    return Factored(known.names, (value, weight), multiplication, finish, replace_unpadded)


def _each(value: Any, dims: int) -> list[int]:
    if isinstance(value, SEQUENCES):
        return list(value) * dims if len(value) == 1 else list(value)
    return [value] * dims


#: Ops whose dimensions are in their arguments.
_OF_ARGUMENTS: Final = frozenset({"einsum", "tensordot"})


def _of_arguments(
    op: str, function: Callable[..., Any], args: Args, kwargs: Kwargs
) -> Factored | None:
    is_equation = op == "einsum"
    factors: Any = (args[1] if len(args) > 1 else None) if is_equation else args[:2]
    if not _are_tensors(factors) or not factors:
        return None
    found = None
    if is_equation:
        found = contractions.of_equation(args[0], factors)
    elif len(args) == 4:
        found = contractions.of_dimensions(*args)
    if found is None:
        return None

    def replace(new: Sequence[Tensor]) -> tuple[Args, Kwargs]:
        changed = (args[0], list(new)) if is_equation else tuple(new)
        return (*changed, *args[2:]), kwargs

    def call(new: Sequence[Tensor]) -> Tensor:
        new_args, new_kwargs = replace(new)
        return function(*new_args, **new_kwargs)  # type: ignore[no-any-return]

    names = ("",) * len(factors)
    multiplication = Multiplication(found, call)
    return Factored(names, tuple(factors), multiplication, lambda result: result, replace)


def _are_tensors(values: Any) -> bool:
    return isinstance(values, SEQUENCES) and all([isinstance(each, Tensor) for each in values])  # noqa: C419
