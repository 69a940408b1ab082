"""The arguments of ops whose numbers torch converts to the dtype of the tensor beside them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ..torch_internals import VF_NAMESPACE
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


@functools.cache
def converting() -> frozenset[str]:
    """Returns the ops that are given numbers which torch converts to the dtype of the tensor beside them."""
    return frozenset(facts("stored_numbers")) | frozenset(facts("factors"))


def converts_numbers(op: str, site: Site) -> bool:
    """Whether calls of ``op`` at ``site`` hold such numbers; nobody fills tensors by ``torch._VF``."""
    return op in converting() and not site.is_property and site.namespace != VF_NAMESPACE


@functools.cache
def numbers(op: str, site: Site) -> Numbers | None:
    """Returns where the calls of ``op`` at ``site`` hold such numbers; None if nowhere."""
    if not converts_numbers(op, site):
        return None
    are_factors = op in facts("factors")
    names = frozenset(facts("factors" if are_factors else "stored_numbers")[op])
    positions = set()
    for schema in schemas(site):
        arguments = [a.name for a in schema.arguments if not a.kwarg_only]
        if site.namespace == "torch.Tensor":  # x.where(c, y) is where(c, self, y)
            arguments.sort(key=lambda name: name != "self")
        positions |= {p for p, name in enumerate(arguments) if name in names}
    return Numbers(frozenset(positions), names, are_factors)
