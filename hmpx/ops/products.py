"""Products as letters: which dimensions of the factors stand for the same index, and which are summed over."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .known_facts import facts


@dataclass(frozen=True)
class Product:
    """An op that multiplies its factors and sums over some of their indices.

    Attributes:
        names: Names of the arguments that are factors.
        letters: For each of them a letter a dimension, as in ``ops.ini``.
        result: Those of the result.
        addend: Name of the argument that is added to the product; None if there is none.
    """

    names: tuple[str, ...]
    letters: tuple[str, ...]
    result: str
    addend: str | None

    @property
    def is_convolution(self) -> bool:
        """Whether a window slides along some dimensions."""
        return "_" in self.result


@functools.cache
def product(op: str) -> Product | None:
    """Returns the product that ``op`` computes; None if it computes none that is known."""
    words = facts("products").get(op)
    if words is None:
        return None
    factors = [word.partition(":") for word in words if ":" in word]
    addends = [word[1:] for word in words if word[0] == "+"]
    results = [word for word in words if ":" not in word and word[0] != "+"]
    return Product(
        names=tuple([name for name, _, _ in factors]),
        letters=tuple([letters for _, _, letters in factors]),
        result=results[0] if results else "",
        addend=addends[0] if addends else None,
    )
