"""Choices among several types, on simulated errors."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest

from hmpx.tuning.candidates import Candidate, Kept, Outcome
from hmpx.tuning.choosing import Prices, bits_of, choose, choose_within, within

TYPES = ("float8_e4m3fn", "bfloat16", "float32")


def simulated(seed: int, n: int = 6, unit: str = "bytes") -> Prices:
    """Returns candidates, each some 20 times better from type to type."""
    draw = random.Random(seed)
    names = [f"op{i}" for i in range(n)]
    scale = {name: math.exp(draw.gauss(0, 2)) for name in names}
    errors = {
        "float8_e4m3fn": {name: 400 * scale[name] for name in names},
        "bfloat16": {name: scale[name] for name in names},
        "float32": dict.fromkeys(names, 0.0),
    }
    candidates = [
        Candidate(name, bytes=draw.randint(1, 9), flops=draw.choice((0, 5))) for name in names
    ]
    return Prices(candidates, TYPES, errors, unit)


def answered(search: Callable[..., Kept], prices: Prices, most: float) -> tuple[Kept, int]:
    """Returns what a search finds where predictions are true, and how many sets it asked for."""
    asked = []

    def evaluate(kept: Kept, phase: str, ahead: object) -> Outcome:
        asked.append(kept)
        return Outcome(math.sqrt(prices.error(decoded(kept, prices))))

    return search(prices, most, evaluate), len(asked)


def decoded(kept: Kept, prices: Prices) -> dict[str, str]:
    choice = prices.cheapest()
    for member in kept:
        name, _, to = member.partition("=")
        choice[name] = to or "float32"
    return choice


@pytest.mark.parametrize("seed", range(20))
def test_the_cheapest_that_passes(seed: int) -> None:
    """No single candidate can be a type cheaper; the cost is near the least of all choices."""
    prices = simulated(seed)
    worst = math.sqrt(prices.error(prices.cheapest()))
    tolerance = 0.1 * worst
    kept, asked = answered(choose, prices, tolerance)
    choice = decoded(kept, prices)
    assert prices.error(choice) <= tolerance**2
    for name, to in choice.items():
        if to != TYPES[0]:
            lower = {**choice, name: TYPES[TYPES.index(to) - 1]}
            assert prices.error(lower) > tolerance**2
    costs = [
        prices.cost(dict(zip(choice, types, strict=True)))
        for types in itertools.product(TYPES, repeat=len(choice))
        if prices.error(dict(zip(choice, types, strict=True))) <= tolerance**2
    ]
    assert prices.cost(choice) <= 1.5 * min(costs)
    assert asked <= 20


@pytest.mark.parametrize("unit", ["bits", "bytes", "flops"])
def test_a_limit_holds(unit: str) -> None:
    """Whatever is limited; more is never worse."""
    prices = simulated(3, unit=unit)
    least = prices.cost(prices.cheapest())
    most = prices.cost(dict.fromkeys(prices.cheapest(), "float32"))
    errors = []
    for share in (0.0, 0.3, 0.6, 1.0):
        limit = least + share * (most - least)
        choice = within(prices, limit)
        assert prices.cost(choice) <= limit + 1e-9
        errors.append(prices.error(choice))
        kept, asked = answered(choose_within, prices, limit)
        assert kept == prices.kept(choice)
        assert asked == 2
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == 0


def test_upgrades_go_from_the_cheapest_to_the_dearest() -> None:
    """One at a time; what passes at once takes one evaluation."""
    prices = simulated(1)
    assert {**prices.cheapest(), **dict(prices.upgrades())} == dict.fromkeys(
        prices.cheapest(), "float32"
    )
    assert answered(choose, prices, 1e9) == (frozenset(), 1)


def test_bits() -> None:
    """Of dtypes and formats; those of blocks include their scales."""
    assert bits_of(["float32", "bfloat16", "mxfp4_e2m1"]) == {
        "float32": 32,
        "bfloat16": 16,
        "mxfp4_e2m1": 4.25,
    }
