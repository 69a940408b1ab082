"""Chooses a type for each op among several, by the error that each would make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from .. import number_formats
from ..errors import OptionError
from .assignment import FP32
from .candidates import Candidate, Kept, Scores
from .search import Evaluate

#: Units of a limit.
UNITS: Final = ("bits", "flops", "bytes")

#: A candidate's name -> the name of its type.
Choice = Mapping[str, str]

#: The squared error of values outside a type's range.
_OUT_OF_RANGE: Final = 1e30


def bits_of(types: Sequence[str]) -> dict[str, float]:
    """Returns the bits of an element of each type.

    Raises:
        OptionError: A type is a custom format, whose bits are unknown.
    """
    found = {}
    for name in types:
        bits = getattr(number_formats.get(name), "bits", None)
        if bits is None:
            raise OptionError(f"{name} does not say how many bits its elements have")
        found[name] = float(bits)
    return found


def squared_errors(candidates: Sequence[Candidate], scores: Scores) -> dict[str, float]:
    """Maps each candidate to the squared error of computing it in a type."""
    found = {}
    for each in candidates:
        known = [scores[spot] for spot in each.spots if spot in scores]
        is_hard = any(score.is_hard for score in known)
        found[each.name] = _OUT_OF_RANGE if is_hard else sum(score.effect**2 for score in known)
    return found


@dataclass(frozen=True)
class Prices:
    """Costs of the candidates' types.

    The unit is ``"bits"``, averaged over the bytes of all ops; ``"flops"``, the share of FLOPs not in the
    cheapest type; or ``"bytes"``, as a share of those in fp32.
    """

    candidates: Sequence[Candidate]
    types: tuple[str, ...]  # the cheapest first
    errors: Mapping[str, Mapping[str, float]]  # a type -> a candidate -> its squared error
    unit: str = "bytes"

    def cost(self, choice: Choice) -> float:
        """Returns the cost of a choice."""
        weight = sum(map(self._weight, self.candidates)) or 1.0
        return sum(self.price(each, choice[each.name]) for each in self.candidates) / weight

    def error(self, choice: Choice) -> float:
        """Returns the predicted squared error of a choice."""
        return sum(self.errors[choice[each.name]][each.name] for each in self.candidates)

    def price(self, candidate: Candidate, name: str) -> float:
        """Returns the share of a candidate in a type in the total cost."""
        if self.unit == "flops":
            return self._weight(candidate) * (name != self.types[0])
        bits = bits_of([name])[name]
        return self._weight(candidate) * bits / (32 if self.unit == "bytes" else 1)

    def _weight(self, candidate: Candidate) -> float:
        return float(candidate.flops if self.unit == "flops" else candidate.bytes)

    def path(self) -> list[dict[str, str]]:
        """Returns choices from the cheapest to the dearest: each step removes most error for its price.

        A step may skip an intermediate type that removes little.
        """
        found = [{each.name: self.types[0] for each in self.candidates}]
        while True:
            rates = []
            for each in self.candidates:
                now = found[-1][each.name]
                for to in self.types[self.types.index(now) + 1 :]:
                    gain = self.errors[now][each.name] - self.errors[to][each.name]
                    price = self.price(each, to) - self.price(each, now)
                    rates.append((gain / (price + 1e-9), each.name, to))
            if not rates:
                return found
            _, name, to = max(rates)
            found.append({**found[-1], name: to})

    def kept(self, choice: Choice) -> Kept:
        """Returns a choice as a set: ``"softmax"`` for fp32, ``"linear=bfloat16"`` for other types."""
        return frozenset(
            name if to == FP32 else f"{name}={to}"
            for name, to in choice.items()
            if to != self.types[0]
        )


def within(prices: Prices, most: float) -> dict[str, str]:
    """Returns the choice with the least predicted error whose cost is within a limit.

    Greedy: takes the steps of the path in order and skips those that cost too much.
    """
    choice, *path = prices.path()
    before = choice
    for after in path:
        ((name, to),) = after.items() - before.items()
        before, tried = after, {**choice, name: to}
        gains = prices.errors[choice[name]][name] > prices.errors[to][name]
        if gains and prices.cost(tried) <= most * (1 + 1e-12):
            choice = tried
    return choice


def choose_within(prices: Prices, most: float, evaluate: Evaluate) -> Kept:
    """Returns the best predicted choice within a limit."""
    evaluate(frozenset(), "all low")
    found = prices.kept(within(prices, most))
    evaluate(found, "limit")
    return found


def choose(prices: Prices, tolerance: float, evaluate: Evaluate) -> Kept:
    """Returns the cheapest choice found within the tolerance.

    Bisects for the first passing choice on the path. Then lowers each upgrade by one type where the choice
    still passes, dearest first. The dearest choice of all is known to pass.
    """

    def passes(choice: Choice, phase: str) -> bool:
        return evaluate(prices.kept(choice), phase).error <= tolerance

    path = prices.path()
    if passes(path[0], "all low"):
        return prices.kept(path[0])
    low, high = 0, len(path) - 1
    guess = next((i for i, each in enumerate(path) if prices.error(each) <= tolerance**2), high)
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1)
        if passes(path[guess], "prefix"):
            high = guess
        else:
            low = guess
        guess = (low + high) // 2
    choice, needed = path[high], set[str]()
    while True:
        steps = []
        for each in prices.candidates:
            place = prices.types.index(now := choice[each.name])
            if place and each.name not in needed:
                lower = prices.types[place - 1]
                saved = prices.price(each, now) - prices.price(each, lower)
                steps.append((saved, each.name, lower))
        if not steps:
            return prices.kept(choice)
        _, name, lower = max(steps)
        if passes({**choice, name: lower}, "prune"):
            choice, needed = {**choice, name: lower}, set()
        else:
            needed.add(name)
