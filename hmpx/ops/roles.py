"""Which of an op's inputs are weights, as far as their names tell."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Final

from .known_facts import facts
from .op_table import table
from .signatures import parameters

#: What torch's schemas call tensors of integers.
_INTEGERS: Final = frozenset({"index", "indices", "offsets"})

#: What torch's schemas, and `multi_head_attention_forward`, call what is added to scores.
_MASKS: Final = frozenset({"attn_bias", "attn_mask", "key_padding_mask"})


def is_weight(name: str) -> bool:
    """Whether an argument is a weight, by its name."""
    return name.endswith("weight")


def is_mask(name: str) -> bool:
    """Whether an argument is added to the scores of an attention, by its name."""
    return name in _MASKS


def names_weights(names: Iterable[str]) -> bool:
    """Whether one of these arguments is a weight by its name: then no other one is a weight."""
    return any(map(is_weight, names))


@functools.cache
def idle_roles(op: str) -> dict[str, str]:
    """Returns the words of a list's line that change nothing of op ``op``, and why.

    Empty where schemas don't tell.
    """
    sites = [site for site in table()[op].sites if not site.is_python] if op in table() else []
    names = set()
    for site in sites:
        found = parameters(site)
        if found.has_keyword_tensors or not found.kinds:
            return {}
        names |= {found.names[position] for position in found.kinds}
    inputs = {name for name in names - _INTEGERS if not name.endswith("bias")}
    weights = set(filter(is_weight, inputs))
    idle = {}
    if weights and weights == inputs:
        idle["activations"] = "its only floating input is a weight"
    if weights and weights <= set(facts("parameters").get(op, ())):
        idle["weights"] = "weights of norms are not rounded"
    return idle
