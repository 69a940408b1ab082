"""Choices among several types, on simulated errors."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from hmpx.tuning.candidates import Candidate, Kept
from hmpx.tuning.choosing import (
    Prices,
    bits_of,
    choose_within,
    encoded,
    path_of_choices,
    search_types,
    within,
)
from hmpx.tuning.search import Search

TYPES = ("float8_e4m3fn", "bfloat16", "float32")


def simulated(seed: int, n: int = 6, unit: str = "bytes") -> tuple[list[Candidate], Prices]:
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
    return candidates, Prices(TYPES, bits_of(TYPES), errors, unit)


def answered(search: Search, candidates: list[Candidate], prices: Prices) -> tuple[Kept, int]:
    """Returns what a search finds where predictions are true, and how many sets it asked for."""
    asked = 0
    try:
        ask = next(search)
        while True:
            asked += 1
            ask = search.send(math.sqrt(prices.error(candidates, decoded(ask.kept, candidates))))
    except StopIteration as done:
        return done.value, asked


def decoded(kept: Kept, candidates: list[Candidate]) -> dict[str, str]:
    choice = {each.name: TYPES[0] for each in candidates}
    for member in kept:
        name, _, to = member.partition("=")
        choice[name] = to or "float32"
    return choice


@pytest.mark.parametrize("seed", range(20))
def test_the_cheapest_that_passes(seed: int) -> None:
    """No single candidate can be a type cheaper; the cost is near the least of all choices."""
    candidates, prices = simulated(seed)
    worst = math.sqrt(prices.error(candidates, decoded(frozenset(), candidates)))
    tolerance = 0.1 * worst
    kept, asked = answered(search_types(candidates, prices, tolerance), candidates, prices)
    choice = decoded(kept, candidates)
    assert prices.error(candidates, choice) <= tolerance**2
    for name, to in choice.items():
        if to != TYPES[0]:
            lower = {**choice, name: TYPES[TYPES.index(to) - 1]}
            assert prices.error(candidates, lower) > tolerance**2
    costs = [
        prices.of(candidates, dict(zip(choice, types, strict=True)))
        for types in itertools.product(TYPES, repeat=len(candidates))
        if prices.error(candidates, dict(zip(choice, types, strict=True))) <= tolerance**2
    ]
    assert prices.of(candidates, choice) <= 1.5 * min(costs)
    assert asked <= 20


@pytest.mark.parametrize("unit", ["bits", "bytes", "flops"])
def test_a_limit_holds(unit: str) -> None:
    """Whatever is limited; more is never worse."""
    candidates, prices = simulated(3, unit=unit)
    least = prices.of(candidates, decoded(frozenset(), candidates))
    most = prices.of(candidates, {each.name: "float32" for each in candidates})
    errors = []
    for share in (0.0, 0.3, 0.6, 1.0):
        limit = least + share * (most - least)
        choice = within(candidates, prices, limit)
        assert prices.of(candidates, choice) <= limit + 1e-9
        errors.append(prices.error(candidates, choice))
        kept, asked = answered(choose_within(candidates, prices, limit), candidates, prices)
        assert kept == encoded(choice, TYPES[0])
        assert asked == 2
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == 0


def test_upgrades_go_from_the_cheapest_to_the_dearest() -> None:
    """One at a time; what passes at once takes one evaluation."""
    candidates, prices = simulated(1)
    path = path_of_choices(candidates, prices)
    assert set(path[0].values()) == {TYPES[0]}
    assert set(path[-1].values()) == {"float32"}
    for before, after in itertools.pairwise(path):
        assert sum(before[name] != after[name] for name in before) == 1
    assert answered(search_types(candidates, prices, 1e9), candidates, prices) == (frozenset(), 1)


def test_bits() -> None:
    """Of dtypes and formats; those of blocks include their scales."""
    assert bits_of(["float32", "bfloat16", "mxfp4_e2m1"]) == {
        "float32": 32,
        "bfloat16": 16,
        "mxfp4_e2m1": 4.25,
    }
