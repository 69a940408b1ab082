"""Chooses a type for each op among several, from the errors that each would make."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from .. import number_formats
from ..errors import OptionError
from .asking import Ask, Asking
from .assignment import FP32
from .candidates import Candidate, Kept

#: What a limit may be on.
UNITS: Final = ("bits", "flops", "bytes")

#: A candidate's name -> the name of its type.
Choice = Mapping[str, str]


@dataclass(frozen=True)
class Prices:
    """What types cost.

    Attributes:
        types: Names of the types, the cheapest first.
        bits: Name -> bits of an element.
        errors: Name -> candidate -> its squared error in that type.
        unit: What is counted: ``"bits"``, on average over the bytes of all ops, ``"flops"``: the share of
            FLOPs that are not in the cheapest type, or ``"bytes"``: bytes as a share of those in fp32.
    """

    types: tuple[str, ...]
    bits: Mapping[str, float]
    errors: Mapping[str, Mapping[str, float]]
    unit: str

    def of(self, candidates: Sequence[Candidate], choice: Choice) -> float:
        """Returns the cost of a choice."""
        weight = sum(self._weight(each) for each in candidates) or 1.0
        total = sum(self._weight(each) * self._price(choice[each.name]) for each in candidates)
        return total / weight

    def error(self, candidates: Sequence[Candidate], choice: Choice) -> float:
        """Returns the squared error that is predicted for a choice."""
        return sum(self.errors[choice[each.name]][each.name] for each in candidates)

    def _weight(self, candidate: Candidate) -> float:
        return float(candidate.flops if self.unit == "flops" else candidate.bytes)

    def _price(self, name: str) -> float:
        if self.unit == "flops":
            return float(name != self.types[0])
        return self.bits[name] / (32 if self.unit == "bytes" else 1)

    def step(self, candidate: Candidate, a: str, b: str) -> float:
        """Returns what it prices more to compute ``candidate`` in type ``b`` than in ``a``."""
        return self._weight(candidate) * (self._price(b) - self._price(a))


def bits_of(types: Sequence[str]) -> dict[str, float]:
    """Returns the bits of an element of each type.

    Raises:
        OptionError: A type is the user's own, whose bits are not known.
    """
    found = {}
    for name in types:
        bits = getattr(number_formats.get(name), "bits", None)
        if bits is None:
            raise OptionError(f"{name} does not say how many bits its elements have")
        found[name] = float(bits)
    return found


def path_of_choices(candidates: Sequence[Candidate], prices: Prices) -> list[dict[str, str]]:
    """Returns choices from all in the cheapest type to all in the dearest, each one upgrade further.

    Each upgrade is the one that takes most error away for what it prices. Where a type in the middle takes
    little away by itself, one that is dearer is reached in one step.
    """
    choice = {each.name: prices.types[0] for each in candidates}
    found = [dict(choice)]
    while True:
        best: tuple[float, str, str] | None = None
        for each in candidates:
            now = choice[each.name]
            for to in prices.types[prices.types.index(now) + 1 :]:
                gain = prices.errors[now][each.name] - prices.errors[to][each.name]
                rate = gain / (prices.step(each, now, to) + 1e-9)
                if best is None or (rate, each.name, to) > best:
                    best = rate, each.name, to
        if best is None:
            return found
        _, name, to = best
        choice[name] = to
        found.append(dict(choice))


def within(candidates: Sequence[Candidate], prices: Prices, budget: float) -> dict[str, str]:
    """Returns the choice with the least predicted error whose cost is within the budget.

    Greedy: the upgrades of `path_of_choices` in their order, without those that would cost too much.
    """
    choice = {each.name: prices.types[0] for each in candidates}
    by_name = {each.name: each for each in candidates}
    path = path_of_choices(candidates, prices)
    for before, after in itertools.pairwise(path):
        (name,) = [each for each in after if after[each] != before[each]]
        tried = {**choice, name: after[name]}
        gains = prices.errors[choice[name]][name] > prices.errors[after[name]][name]
        if gains and prices.of([*by_name.values()], tried) <= budget * (1 + 1e-12):
            choice = tried
    return choice


def encoded(choice: Choice, cheapest: str) -> Kept:
    """Returns a choice as a set: ``"softmax"`` for fp32, ``"linear=bfloat16"`` for other types."""
    return frozenset(
        name if to == FP32 else f"{name}={to}" for name, to in choice.items() if to != cheapest
    )


def search_types(candidates: Sequence[Candidate], prices: Prices, tolerance: float) -> Asking[Kept]:
    """Yields what to evaluate, and returns the cheapest choice found within the tolerance.

    The first on the path of upgrades that passes, by bisection, then each upgrade taken back by one type
    where that still passes, the dearest first. The dearest choice of all is known to pass.
    """
    path = path_of_choices(candidates, prices)

    def ask(choice: Choice, phase: str) -> Ask:
        return Ask(encoded(choice, prices.types[0]), phase)

    if (yield ask(path[0], "all low")) <= tolerance:
        return encoded(path[0], prices.types[0])
    low, high = 0, len(path) - 1
    guess = next(
        (i for i, each in enumerate(path) if prices.error(candidates, each) <= tolerance**2), high
    )
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1)
        if (yield ask(path[guess], "prefix")) <= tolerance:
            high = guess
        else:
            low = guess
        guess = (low + high) // 2
    choice = path[high]
    return (yield from _lowered(candidates, prices, choice, tolerance))


def _lowered(
    candidates: Sequence[Candidate], prices: Prices, choice: dict[str, str], tolerance: float
) -> Asking[Kept]:
    """Yields what to evaluate, and returns a choice in which no single candidate can be one type cheaper."""
    needed: set[str] = set()
    while True:
        rates = {}
        for each in candidates:
            level = prices.types.index(choice[each.name])
            if level and each.name not in needed:
                rates[each.name] = prices.step(each, prices.types[level - 1], choice[each.name])
        if not rates:
            return encoded(choice, prices.types[0])
        name = max(rates, key=lambda name: (rates[name], name))
        lower = prices.types[prices.types.index(choice[name]) - 1]
        tried = {**choice, name: lower}
        if (yield Ask(encoded(tried, prices.types[0]), "sweep")) <= tolerance:
            choice, needed = tried, set()
        else:
            needed.add(name)


def choose_within(candidates: Sequence[Candidate], prices: Prices, budget: float) -> Asking[Kept]:
    """Yields what to evaluate, and returns the best choice by prediction that the budget allows."""
    yield Ask(frozenset(), "all low")
    found = encoded(within(candidates, prices, budget), prices.types[0])
    yield Ask(found, "limit")
    return found
