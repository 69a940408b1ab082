"""Facts about torch's ops that torch does not expose at run time: the data in ``ops.ini``."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from dataclasses import dataclass

from ..files import read_sections
from ..torch_internals import torch_version


def facts(section: str) -> Mapping[str, tuple[str, ...]]:
    """Returns one section of ``ops.ini``: op (or alias, or site) -> the words of its value."""
    return _all_facts()[section]


def draws(op: str) -> bool:
    """Whether an op draws random numbers, itself or in ops that its code calls."""
    return op in facts("random") or op in facts("random_inside")


@functools.cache
def renamings(section: str) -> Mapping[str, str]:
    """Returns a section of ``ops.ini`` that maps each name to one other name."""
    return types.MappingProxyType({name: words[0] for name, words in facts(section).items()})


@functools.cache
def _all_facts() -> Mapping[str, Mapping[str, tuple[str, ...]]]:
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for header, keys in read_sections(__package__, "ops.ini").items():
        section, _, ended = header.partition(" ; torch < ")
        if not ended or torch_version() < tuple(map(int, ended.split("."))):
            words = {name: tuple(value.split()) for name, value in keys.items()}
            found.setdefault(section, {}).update(words)
    return {section: types.MappingProxyType(keys) for section, keys in found.items()}


@dataclass(frozen=True)
class Product:
    """An op that multiplies its factors and sums over some of their indices."""

    names: tuple[str, ...]  # Names of the arguments that are factors
    letters: tuple[str, ...]  # For each factor, one letter per dimension, as in ``ops.ini``
    result: str  # The result's letters
    addend: str | None  # Name of the argument that is added to the product; None if there is none

    @property
    def is_convolution(self) -> bool:
        """Whether a window slides along some dimensions."""
        return "_" in self.result


@functools.cache
def product(op: str) -> Product | None:
    """Returns the product that ``op`` computes; None if it computes no known product."""
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
