"""Shipped lists run einsum in low precision only where it sums products, as torch.autocast does.

torch computes other equations elementwise, such as ``"i,j->ij"`` of positions and frequencies. Rounded to
bfloat16, positions above 256 would coincide.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Final

from .calls import Call
from .decisions import CastPolicy, Decision
from .lists import SHIPPED

NAME: Final = "einsum"
_PASS: Final = Decision(CastPolicy.PASS, reason="an einsum that sums no products")


def leaves_pointwise_einsums(decisions: Mapping[str, Decision]) -> bool:
    """Whether a shipped list puts einsum in low precision, so that `pass_pointwise` must decide first."""
    decision = decisions.get(NAME)
    if decision is None or decision.cast_policy is not CastPolicy.LOW:
        return False
    return decision.reason.startswith(SHIPPED)


def pass_pointwise(call: Call) -> Decision | None:
    """A rule: leaves calls alone that sum no products."""
    equation = call.kwargs.get("equation")
    if isinstance(equation, str) and not sums_products(equation, call.shapes):
        return _PASS
    return None


def sums_products(equation: str, shapes: Sequence[Sequence[int]]) -> bool:
    """Whether an index is summed that is longer than 1 in several operands."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    counts: collections.Counter[str | int] = collections.Counter(inputs)
    longer: collections.Counter[str | int] = collections.Counter()
    for term, shape in zip(terms, shapes, strict=False):
        before, dots, after = term.partition("...")
        sizes: list[tuple[str | int, int]] = [*zip(before, shape, strict=False)]
        sizes += zip(reversed(after), reversed(shape), strict=False)
        if dots:  # its dimensions are right-aligned
            sizes += enumerate(reversed(shape[len(before) : len(shape) - len(after)]))
        longer.update({index for index, size in sizes if size != 1})
    summed = {
        index
        for index in longer
        if (
            (index if isinstance(index, str) else "...") not in output
            if arrow
            else counts[index] > 1
        )
    }
    return any(longer[index] > 1 for index in summed)
