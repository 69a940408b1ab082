"""Products whose factors are rounded separately for each product: the forward and each gradient.

Blocks and rows share a scale along the reduced dimension, as in hardware instructions. The products of the
forward and the backward reduce over different dimensions of the same factors, so each rounds the original
factors separately.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from ..number_formats import Format, Rounder, straight_through
from ..ops import Product, parameter_named, product
from ..patching import unpatched
from ..tensors import SEQUENCES, Args, Function, Kwargs
from ..torch_internals import HAS_OPERATORS, each_of_batch, is_gradient_batch, may_learn

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

#: A dimension along which a window slides: it does not match a single index of another factor.
WINDOW: Final = "_"

#: Capital in a signature -> the letters of its dimensions, from the last.
_GROUPS: Final = {"A": "ABCDEFGHIJKL", "B": "MNOPQRSTUVWX"}

#: For broadcast dimensions of size 1.
_BROADCAST: Final = "pqrstuvwxyz"


@dataclass(frozen=True, eq=False, slots=True)
class Contraction:
    """The letters of a product's factors, and of its result; how to multiply them, and the gradient of each."""

    factors: tuple[str, ...]
    result: str
    function: Callable[[Sequence[Tensor]], Tensor] | None = None  # None: like `torch.einsum`
    convolution: tuple[Any, ...] | None = None  # the settings, if `torch.convolution` multiplies

    def axes(self, target: int | None = None) -> tuple[int | None, ...]:
        """Returns the last reduced axis of each factor, or None.

        With a target, for the product that is its gradient; the axis of the result's gradient comes last.
        """
        if target is None:
            return tuple([_last_reduced(letters, self.result) for letters in self.factors])
        kept = self.factors[target]
        return tuple([_last_reduced(letters, kept) for letters in (*self.factors, self.result)])

    def equation(self, target: int | None = None) -> tuple[str, str]:
        """Returns the `torch.einsum` equation of the product, or of a factor's gradient, and its result's letters.

        The result's gradient comes first. Letters that only the target has are missing: its gradient is constant
        along them.
        """
        if target is None:
            return f"{','.join(self.factors)}->{self.result}", self.result
        given = (self.result, *[f for i, f in enumerate(self.factors) if i != target])
        kept = "".join([letter for letter in self.factors[target] if letter in "".join(given)])
        return f"{','.join(given)}->{kept}", kept

    def multiply(self, factors: Sequence[Tensor]) -> Tensor:
        if self.convolution is not None:
            value, weight = factors
            return _convolution(value, weight, None, *self.convolution)
        if self.function is not None:
            return self.function(factors)
        found: Tensor = _einsum(self.equation()[0], list(factors))
        return found

    def gradient(self, target: int, factors: Sequence[Tensor], gradient: Tensor) -> Tensor:
        """Returns the gradient of a factor, of which only the shape is used."""
        if self.convolution is not None:
            mask = [target == 0, target == 1, False]
            found = _convolution_backward(gradient, *factors, None, *self.convolution, mask)
            return found[target]  # type: ignore[no-any-return]
        equation, kept = self.equation(target)
        others = [factor for i, factor in enumerate(factors) if i != target]
        found = _einsum(equation, [gradient, *others])
        for axis, letter in enumerate(self.factors[target]):
            if letter not in kept:
                found = _unsqueeze(found, axis)
        return _expand(found, factors[target].shape)


def _last_reduced(letters: str, kept: str) -> int | None:
    """Returns the last axis whose letter is not in ``kept``: t of [b, t, k] for a weight, as in microxcaling."""
    reduced = [axis for axis, letter in enumerate(letters) if letter not in kept + WINDOW]
    return reduced[-1] if reduced else None


def contraction(product: Product, factors: Sequence[Tensor]) -> Contraction | None:
    """Returns the letters of a call with these factors; None if they don't fit the product's."""
    expanded = []
    for letters, factor in zip(product.letters, factors, strict=True):
        found = _expanded(letters, factor.dim(), product.result)
        if found is None:
            return None
        expanded.append(found)
    sizes: dict[str, int] = {}
    for letters, factor in zip(expanded, factors, strict=True):
        for letter, size in zip(letters, factor.shape, strict=True):
            sizes[letter] = max(sizes.get(letter, 1), size)
    unused = iter(_BROADCAST)
    named = [
        "".join([
            next(unused) if letter.isupper() and size == 1 != sizes[letter] else letter
            for letter, size in zip(letters, factor.shape, strict=True)
        ])
        for letters, factor in zip(expanded, factors, strict=True)
    ]  # fmt: skip
    return Contraction(tuple(named), _result(product.result, expanded))


def _expanded(letters: str, dims: int, result: str) -> str | None:
    if WINDOW in letters:
        return letters.replace(WINDOW, WINDOW * (dims - len(letters) + 1))
    group = next((letter for letter in letters if letter.isupper()), None)
    if group is None:
        return letters if len(letters) == dims else None
    count = dims - len(letters) + 1
    if count < 0:  # a vector has only the summed index
        letters = "".join([each for each in letters if each.islower() and each not in result])
        return letters if len(letters) == dims else None
    if count > len(_GROUPS[group]):
        return None
    return letters.replace(group, _GROUPS[group][:count][::-1])


def _result(result: str, factors: Iterable[str]) -> str:
    """Returns the letters of the result: the longest of each group, and all present ones of the rest."""
    given = set("".join(factors))
    found = ""
    for letter in result:
        if letter in _GROUPS:
            found += "".join([each for each in reversed(_GROUPS[letter]) if each in given])
        elif letter in given:
            found += letter
    return found


# --- products whose letters are in their arguments ----------------------------------------------


def of_equation(equation: object, factors: Sequence[Tensor]) -> Contraction | None:
    """Returns the letters of a call of `torch.einsum`; None for those with dots or repeated letters."""
    if not isinstance(equation, str) or "." in equation:
        return None
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    letters = inputs.split(",")
    if not arrow:
        counted = "".join(letters)
        result = "".join(sorted([each for each in set(counted) if counted.count(each) == 1]))
    if len(letters) != len(factors) or not all(
        len(set(each)) == len(each) == factor.dim() and set(each) <= set(string.ascii_letters)
        for each, factor in zip(letters, factors, strict=True)
    ):
        return None
    return Contraction(tuple(letters), result)


def of_dimensions(a: Tensor, b: Tensor, dims_a: Any, dims_b: Any) -> Contraction | None:
    """Returns the letters of a call of `torch.tensordot`, which sums over these dimensions."""
    if not isinstance(dims_a, SEQUENCES) or not isinstance(dims_b, SEQUENCES):
        return None
    letters = iter(string.ascii_letters)
    of_a = [next(letters) for _ in range(a.dim())]
    of_b = [next(letters) for _ in range(b.dim())]
    for of_one, of_other in zip(dims_a, dims_b, strict=True):
        of_b[of_other] = of_a[of_one]
    summed = set(of_a) & set(of_b)
    result = "".join([each for each in (*of_a, *of_b) if each not in summed])
    return Contraction(("".join(of_a), "".join(of_b)), result)


#: Returns the function that rounds along an axis; None for the format's own axis.
ByAxis: TypeAlias = Callable[[int | None], Rounder]

#: Returns a call's arguments with other factors.
_WithFactors: TypeAlias = Callable[[Sequence[Tensor]], tuple[Args, Kwargs]]


def has_axis(format: Format) -> bool:
    """Whether values along an axis are rounded together."""
    return format.block_axis is not None


@dataclass(frozen=True, eq=False)
class EmulatedProduct:
    """A product, and how its factors are rounded."""

    contraction: Contraction  # the product, and the gradients of its factors
    rounders: tuple[ByAxis | None, ...]  # each factor's; None if it is already rounded
    #: Rounds the result's gradient for the products of the backward; None computes gradients in full precision,
    #: from the forward's rounded values.
    gradient: ByAxis | None

    def compute(self, factors: Sequence[Tensor]) -> Tensor:
        if self.gradient is None:
            return self.multiplied(factors)
        return self.applied(factors)

    def applied(self, factors: Sequence[Tensor]) -> Tensor:
        """Returns the product, whose gradients are those of `gradient_of`."""
        if not may_learn(*factors):
            return self.multiplied(factors)
        return _EmulatedMatmul.apply(self, *factors)  # type: ignore[no-any-return, no-untyped-call]

    def multiplied(self, factors: Sequence[Tensor]) -> Tensor:
        return self.contraction.multiply(self.rounded(factors))

    def rounded(self, factors: Sequence[Tensor], target: int | None = None) -> list[Tensor]:
        """Returns the factors rounded for the forward's product, or for that of a gradient."""
        axes = self.contraction.axes(target)
        return [
            factor if by_axis is None or i == target else straight_through(factor, by_axis(axes[i]))
            for i, (factor, by_axis) in enumerate(zip(factors, self.rounders, strict=True))
        ]

    def gradient_of(self, target: int, factors: Sequence[Tensor], gradient: Tensor) -> Tensor:
        axis = self.contraction.axes(target)[-1]
        rounded = self.rounded_gradient(gradient, axis)
        return self.contraction.gradient(target, self.rounded(factors, target), rounded)

    def rounded_gradient(self, gradient: Tensor, axis: int | None) -> Tensor:
        """Returns a gradient, or a tangent, rounded along the axis over which a product sums."""
        assert self.gradient is not None
        round_ = self.gradient(axis)
        return straight_through(gradient, round_, round_)


class _EmulatedMatmul(torch.autograd.Function):
    """The product; its gradients are also products of rounded values."""

    drawn_as = "matmul"

    generate_vmap_rule = True

    @staticmethod
    def forward(product: EmulatedProduct, *factors: Tensor) -> Tensor:
        return product.multiplied(factors)

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
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Tensor:
        product, rounded = ctx.product, ctx.product.rounded(ctx.saved_tensors)
        axes = product.contraction.axes()
        terms = [
            product.contraction.multiply(
                [*rounded[:i], product.rounded_gradient(tangent, axes[i]), *rounded[i + 1 :]]
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
    contraction: Contraction  # how they are multiplied
    finish: Callable[[Tensor], Tensor]  # converts the product to the call's result
    with_factors: _WithFactors  # returns the call's arguments with other factors
    is_result: bool = True  # the product is the call's result, in its shape


def may_be_factored(op: str) -> bool:
    return op in _OF_ARGUMENTS or product(op) is not None


def factored(
    op: str, names: tuple[str, ...], function: Function, args: Args, kwargs: Kwargs
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

    def with_factors(new: Sequence[Tensor], **others: None) -> tuple[Args, Kwargs]:
        changed = {**dict(zip(known.names, new, strict=True)), **others}
        new_args = [changed.get(name, value) for name, value in zip(names, args, strict=False)]
        return tuple(new_args), {
            name: changed.get(parameter_named(name, names), value) for name, value in kwargs.items()
        }

    if known.is_convolution:
        return _convolved(known, factors, given, with_factors)
    found = contraction(known, factors)
    addend = given.get(known.addend) if known.addend else None
    if found is None or given.get("out_dtype") is not None:
        return None

    def call(new: Sequence[Tensor]) -> Tensor:
        new_args, new_kwargs = with_factors(new, **({known.addend: None} if known.addend else {}))
        return function(*new_args, **new_kwargs)  # type: ignore[no-any-return]

    is_bias = known.addend in (None, "bias")
    return Factored(
        known.names,
        factors,
        Contraction(found.factors, found.result, call if is_bias else None),
        lambda result: _scaled_sum(result, given.get("alpha", 1), addend, given.get("beta", 1)),
        with_factors,
        is_result=addend is None and given.get("alpha", 1) == 1,
    )


def _scaled_sum(result: Tensor, alpha: Any, addend: Any, beta: Any) -> Tensor:
    if alpha != 1:
        result = _mul(result, alpha)
    if addend is None or beta == 0:
        return result
    return _add(result, addend if beta == 1 else _mul(addend, beta))


def _convolved(
    known: Product, factors: Sequence[Any], given: Mapping[str, Any], with_factors: _WithFactors
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
    found = contraction(known, (value, weight))
    if found is None:
        return None
    bias = given.get(known.addend or "")

    def finish(result: Tensor) -> Tensor:
        if bias is not None:
            result = _add(result, _reshape(bias, (-1, *[1] * dims)))
        return result if is_batch else _squeeze(result, 0)

    def with_unpadded(new: Sequence[Tensor]) -> tuple[Args, Kwargs]:
        value = new[0] if is_batch else _squeeze(new[0], 0)
        for axis, size in enumerate(reversed(missing), start=1):
            value = value.narrow(-axis, 0, value.shape[-axis] - size)
        return with_factors((value, new[1]))

    found = Contraction(found.factors, found.result, convolution=settings)
    return Factored(known.names, (value, weight), found, finish, with_unpadded)


def _each(value: Any, dims: int) -> list[int]:
    if isinstance(value, SEQUENCES):
        return list(value) * dims if len(value) == 1 else list(value)
    return [value] * dims


#: Ops whose dimensions are in their arguments.
_OF_ARGUMENTS: Final = frozenset({"einsum", "tensordot"})


def _of_arguments(op: str, function: Function, args: Args, kwargs: Kwargs) -> Factored | None:
    is_equation = op == "einsum"
    factors: Any = (args[1] if len(args) > 1 else None) if is_equation else args[:2]
    if not _are_tensors(factors) or not factors:
        return None
    found = None
    if is_equation:
        found = of_equation(args[0], factors)
    elif len(args) == 4:
        found = of_dimensions(*args)
    if found is None:
        return None

    def with_factors(new: Sequence[Tensor]) -> tuple[Args, Kwargs]:
        changed = (args[0], list(new)) if is_equation else tuple(new)
        return (*changed, *args[2:]), kwargs

    def call(new: Sequence[Tensor]) -> Tensor:
        new_args, new_kwargs = with_factors(new)
        return function(*new_args, **new_kwargs)  # type: ignore[no-any-return]

    names, found = ("",) * len(factors), Contraction(found.factors, found.result, call)
    return Factored(names, tuple(factors), found, lambda result: result, with_factors)


def _are_tensors(values: Any) -> bool:
    return isinstance(values, SEQUENCES) and all([isinstance(each, Tensor) for each in values])  # noqa: C419
