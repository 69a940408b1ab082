"""The dimensions over which a product reduces: in the forward, and in the gradient of each factor.

Every factor's gradient is also a product, of the result's gradient and the other factors. A
dimension is a letter here, the same letter for the same index.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from ..ops import Product
from ..tensors import SEQUENCES

#: A dimension along which a window slides: it does not match a single index of another factor.
WINDOW: Final = "_"

#: Capital in a signature -> the letters of its dimensions, from the last.
_GROUPS: Final = {"A": "ABCDEFGHIJKL", "B": "MNOPQRSTUVWX"}

#: For broadcast dimensions of size 1.
_BROADCAST: Final = "pqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Contraction:
    """The letters of a product's factors, and of its result."""

    factors: tuple[str, ...]
    result: str

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
    """Returns a letter for each of ``dims`` dimensions."""
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
