"""The arguments of ops whose numbers torch converts to the dtype of the tensor beside them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .known_facts import facts
from .schemas import schemas
from .sites import Site


@dataclass(frozen=True, slots=True)
class Numbers:
    """Where a call of a site may hold numbers that torch converts to the dtype of its tensor.

    Attributes:
        positions: By position.
        names: By name.
        are_factors: They take part in a computation; otherwise they are stored, or are bounds.
    """

    positions: frozenset[int]
    names: frozenset[str]
    are_factors: bool


def converts_numbers(op: str) -> bool:
    """Whether torch converts numbers that ``op`` is given to the dtype of the tensor beside them."""
    return op in facts("stored_numbers") or op in facts("factors")


@functools.cache
def numbers(op: str, site: Site) -> Numbers | None:
    """Returns where the calls of ``op`` at ``site`` hold such numbers; None if nowhere."""
    are_factors = op in facts("factors")
    names = frozenset(facts("factors" if are_factors else "stored_numbers").get(op, ()))
    positions = set()
    for schema in schemas(site):
        arguments = [a.name for a in schema.arguments if not a.kwarg_only]
        if site.namespace == "torch.Tensor":  # x.where(c, y) is where(c, self, y)
            arguments.sort(key=lambda name: name != "self")
        positions |= {p for p, name in enumerate(arguments) if name in names}
    if not names or site.is_property:
        return None
    return Numbers(frozenset(positions), names, are_factors)
