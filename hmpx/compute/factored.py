"""Calls of products taken apart: the factors, what is added to their product, and gradients as products.

Independent of formats and rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from ..ops import Product, parameter_named, product
from ..patching import unpatched
from ..tensors import SEQUENCES, Args, Kwargs
from ..torch_internals import HAS_OPERATORS
from . import contractions
from .contractions import Contraction

# As they are where nothing is patched: op lists may name any of them.
_mul, _add, _expand, _unsqueeze = unpatched(torch.mul, torch.add, Tensor.expand, Tensor.unsqueeze)
_squeeze, _reshape, _pad, _convolution = unpatched(
    Tensor.squeeze,
    Tensor.reshape,
    torch.constant_pad_nd,
    torch.convolution,
)
_aten: Any = torch.ops.aten if HAS_OPERATORS else None  # else `convert` refuses
_einsum: Any = getattr(_aten, "einsum", None)
_convolution_backward: Any = getattr(_aten, "convolution_backward", None)


class Multiplication(Protocol):
    """How factors are multiplied, and how the gradient of each is computed."""

    @property
    def contraction(self) -> Contraction:
        """The factors' dimensions."""

    def multiply(self, factors: Sequence[Tensor]) -> Tensor:
        """Returns the product."""

    def gradient(self, target: int, factors: Sequence[Tensor], gradient: Tensor) -> Tensor:
        """Returns the gradient of a factor; of that one itself only the shape is used."""


@dataclass(frozen=True, eq=False)
class Factored:
    """A call of a product, taken apart.

    Attributes:
        names: Names of the arguments that are factors.
        factors: Their values.
        multiplication: How they are multiplied.
        finish: Makes the call's result of the product.
        replace: Returns the call's arguments with other factors.
    """

    names: tuple[str, ...]
    factors: tuple[Tensor, ...]
    multiplication: Multiplication
    finish: Callable[[Tensor], Tensor]
    replace: Callable[[Sequence[Tensor]], tuple[Args, Kwargs]]


@dataclass(frozen=True, eq=False)
class _Sum:
    """A sum of products of one element of each factor.

    Attributes:
        contraction: The factors' dimensions.
        function: Computes it of the factors; None: as `torch.einsum` does.
    """

    contraction: Contraction
    function: Callable[[Sequence[Tensor]], Tensor] | None

    def multiply(self, factors: Sequence[Tensor]) -> Tensor:
        if self.function is not None:
            return self.function(factors)
        equation, _ = self.contraction.equation()
        found: Tensor = _einsum(equation, list(factors))
        return found

    def gradient(self, target: int, factors: Sequence[Tensor], gradient: Tensor) -> Tensor:
        equation, kept = self.contraction.equation(target)
        others = [factor for i, factor in enumerate(factors) if i != target]
        found: Tensor = _einsum(equation, [gradient, *others])
        for axis, letter in enumerate(self.contraction.factors[target]):
            if letter not in kept:
                found = _unsqueeze(found, axis)
        return _expand(found, factors[target].shape)


@dataclass(frozen=True, eq=False)
class _Convolution:
    """A convolution, with the settings of `torch.convolution`."""

    contraction: Contraction
    settings: tuple[Any, ...]

    def multiply(self, factors: Sequence[Tensor]) -> Tensor:
        value, weight = factors
        return _convolution(value, weight, None, *self.settings)

    def gradient(self, target: int, factors: Sequence[Tensor], gradient: Tensor) -> Tensor:
        mask = [target == 0, target == 1, False]
        found: Tensor = _convolution_backward(gradient, *factors, None, *self.settings, mask)[
            target
        ]
        return found


def factored(
    op: str, names: tuple[str, ...], function: Callable[..., Any], args: Args, kwargs: Kwargs
) -> Factored | None:
    """Returns a call of ``op`` taken apart; None if that is not known how.

    Args:
        op: Op name.
        names: The names of its parameters, by position.
        function: torch's function.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """
    if op in _OF_ARGUMENTS:
        return _OF_ARGUMENTS[op](function, args, kwargs)
    known = product(op)
    if known is None or len(args) > len(names):
        return None
    given = dict(zip(names, args, strict=False))
    given |= {parameter_named(name, names): value for name, value in kwargs.items()}
    factors: tuple[Any, ...] = tuple([given.get(name) for name in known.names])
    if not _are_tensors(factors):
        return None
    if known.is_convolution:
        return _convolved(known, names, factors, given, args, kwargs)
    found = contractions.contraction(known, factors)
    addend = given.get(known.addend) if known.addend else None
    if found is None or given.get("out_dtype") is not None:
        return None

    def replace(new: Sequence[Tensor], *, adds: bool = True) -> tuple[Args, Kwargs]:
        changed = dict(zip(known.names, new, strict=True))
        if not adds and known.addend:
            changed[known.addend] = None  # type: ignore[assignment]
        return _replaced(names, changed, args, kwargs)

    def call(new: Sequence[Tensor]) -> Tensor:
        new_args, new_kwargs = replace(new, adds=False)
        return function(*new_args, **new_kwargs)  # type: ignore[no-any-return]

    is_bias = known.addend in (None, "bias")
    return Factored(
        known.names,
        factors,
        _Sum(found, call if is_bias else None),
        lambda result: _scaled_sum(result, given.get("alpha", 1), addend, given.get("beta", 1)),
        replace,
    )


def _replaced(
    names: tuple[str, ...], changed: Mapping[str, Any], args: Args, kwargs: Kwargs
) -> tuple[Args, Kwargs]:
    """Returns the arguments with those of these names changed."""
    new_args = tuple([changed.get(name, value) for name, value in zip(names, args, strict=False)])
    new_kwargs = {n: changed.get(parameter_named(n, names), value) for n, value in kwargs.items()}
    return new_args, new_kwargs


def _scaled_sum(result: Tensor, alpha: Any, addend: Any, beta: Any) -> Tensor:
    """Returns ``alpha`` times the product plus ``beta`` times the addend."""
    if alpha != 1:
        result = _mul(result, alpha)
    if addend is None or beta == 0:
        return result
    return _add(result, addend if beta == 1 else _mul(addend, beta))


# --- convolutions --------------------------------------------------------------------------------


def _convolved(  # noqa: PLR0917  # all that a call is
    known: Product,
    names: tuple[str, ...],
    factors: Sequence[Any],
    given: Mapping[str, Any],
    args: Args,
    kwargs: Kwargs,
) -> Factored | None:
    """Returns a convolution taken apart."""
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
    if any(missing):  # as torch has it: what is odd goes to the end
        value = _pad(value, [each for size in reversed(missing) for each in (0, size)])
    found = contractions.contraction(known, (value, weight))
    if found is None:
        return None
    bias = given.get(known.addend or "")

    def finish(result: Tensor) -> Tensor:
        if bias is not None:
            result = _add(result, _reshape(bias, (-1, *[1] * dims)))
        return result if is_batch else _squeeze(result, 0)

    def replace(new: Sequence[Tensor]) -> tuple[Args, Kwargs]:
        value = new[0] if is_batch else _squeeze(new[0], 0)
        for axis, size in enumerate(reversed(missing), start=1):
            value = value.narrow(-axis, 0, value.shape[-axis] - size)
        return _replaced(names, dict(zip(known.names, (value, new[1]), strict=True)), args, kwargs)

    return Factored(known.names, (value, weight), _Convolution(found, settings), finish, replace)


def _each(value: Any, dims: int) -> list[int]:
    """Returns a setting for each dimension."""
    if isinstance(value, SEQUENCES):
        return list(value) * dims if len(value) == 1 else list(value)
    return [value] * dims


# --- products whose factors are in lists, or whose dimensions are arguments ------------------------


def _einsum_call(function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Factored | None:
    if len(args) < 2 or not _are_tensors(args[1]):
        return None
    equation, factors, *rest = args
    return _listed(
        contractions.of_equation(equation, factors),
        factors,
        lambda new: ((equation, list(new), *rest), kwargs),
        function,
    )


def _chain_call(function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Factored | None:
    if len(args) != 1 or not _are_tensors(args[0]) or len(args[0]) < 2:
        return None
    found = contractions.of_chain(args[0])
    return _listed(found, args[0], lambda new: ((list(new),), kwargs), function)


def _tensordot_call(function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Factored | None:
    if len(args) != 4 or not _are_tensors(args[:2]):
        return None
    found = contractions.of_dimensions(*args)
    return _listed(found, args[:2], lambda new: ((*new, *args[2:]), kwargs), function)


def _vecdot_call(function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Factored | None:
    if len(args) < 2 or not _are_tensors(args[:2]):
        return None
    dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
    found = contractions.of_vectors(args[0], args[1], dim)
    return _listed(found, args[:2], lambda new: ((*new, *args[2:]), kwargs), function)


def _are_tensors(values: Any) -> bool:
    return isinstance(values, SEQUENCES) and all([isinstance(each, Tensor) for each in values])  # noqa: C419


def _listed(
    found: Contraction | None,
    factors: Sequence[Any],
    replace: Callable[[Sequence[Tensor]], tuple[Args, Kwargs]],
    function: Callable[..., Any],
) -> Factored | None:
    if found is None:
        return None

    def call(new: Sequence[Tensor]) -> Tensor:
        args, kwargs = replace(new)
        return function(*args, **kwargs)  # type: ignore[no-any-return]

    multiplication = _Sum(found, call)
    names = ("",) * len(factors)
    return Factored(names, tuple(factors), multiplication, lambda result: result, replace)


_OF_ARGUMENTS: Final[
    Mapping[str, Callable[[Callable[..., Any], Args, Kwargs], Factored | None]]
] = {
    "chain_matmul": _chain_call,
    "einsum": _einsum_call,
    "linalg_multi_dot": _chain_call,
    "linalg_vecdot": _vecdot_call,
    "tensordot": _tensordot_call,
}


def may_be_factored(op: str) -> bool:
    """Whether calls of ``op`` can be taken apart."""
    return op in _OF_ARGUMENTS or product(op) is not None
