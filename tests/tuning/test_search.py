"""The search on simulated models: what it finds, in how many evaluations, and in which order."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from hmpx.tuning.candidates import Candidate, Kept

from .oracles import TOLERANCE, Oracle, oracle, run

RUNS = 30


def is_minimal(model: Oracle, kept: Kept) -> bool:
    passes = model.error(kept) <= TOLERANCE
    return passes and all(model.error(kept - {name}) > TOLERANCE for name in kept)


#: n, k, by which factor scores are wrong, pair, mean and most evaluations, without that of all in fp32.
CASES = [
    (20, 3, 2, False, 8, 10),
    (60, 3, 2, False, 8, 10),
    (120, 3, 2, False, 8, 10),
    (300, 1, 2, False, 4, 6),
    (300, 3, 2, False, 8, 10),
    (300, 6, 2, False, 16, 18),
    (60, 3, 2, True, 20, 30),
    (300, 6, 2, True, 32, 45),
    (20, 3, 10, False, 13, 30),
    (60, 3, 10, False, 15, 35),
    (300, 3, 10, False, 22, 45),
    (300, 6, 10, False, 40, 70),
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("n", "k", "off", "pair", "mean", "most"), CASES)
def test_the_culprits_are_found(  # noqa: PLR0917
    n: int, k: int, off: float, pair: bool, mean: float, most: int
) -> None:
    """Exactly these, and one of a pair; the number of evaluations hardly grows with n."""
    counts = []
    for seed in range(RUNS):
        model = oracle(n, k, seed=seed, off=off, pair=pair)
        kept, evaluated = run(model.candidates, model.error)
        assert kept - model.pair == model.culprits
        assert len(kept & model.pair) == pair
        assert is_minimal(model, kept)
        counts.append(len(evaluated))
    assert statistics.mean(counts) <= mean
    assert max(counts) <= most


@pytest.mark.parametrize("seed", range(RUNS))
def test_a_verdict_instead_of_an_error(seed: int) -> None:
    """An oracle that only tells whether a set passes, as an exit status does."""
    model = oracle(120, 4, seed=seed, off=2)
    kept, evaluated = run(
        model.candidates, lambda each: 0.0 if model.error(each) <= TOLERANCE else math.inf
    )
    assert kept == model.culprits
    assert len(evaluated) <= 14


@pytest.mark.parametrize("hard", [1, 2, 4])
def test_what_overflows_is_kept_before_anything_is_searched(hard: int) -> None:
    """The second set asked for holds these alone; if it passes, only minimality is left to show."""
    model = oracle(80, 4, seed=hard, hard=hard)
    kept, evaluated = run(model.candidates, model.error)
    assert kept == model.culprits
    assert evaluated[1] == {each.name for each in model.candidates if each.is_hard}
    if hard == 4:
        assert len(evaluated) == 2 + 4


def test_it_is_deterministic() -> None:
    """Neither the order of the candidates nor that of sets of strings counts."""
    model = oracle(40, 4, seed=3, off=10, pair=True)
    first = run(model.candidates, model.error)
    shuffled = list(model.candidates)
    random.Random(0).shuffle(shuffled)
    assert run(shuffled, model.error) == first


def test_minimal_sets_by_brute_force() -> None:
    """Over all errors of small models by subset, monotone or not."""
    for seed in range(40):
        draw = random.Random(seed)
        names = "abcde"
        sets = [
            frozenset(each) for size in range(6) for each in itertools.combinations(names, size)
        ]
        errors = {each: draw.uniform(0, 2) for each in sets}
        errors[frozenset(names)] = 0.0
        kept, _ = run([Candidate(name, score=draw.random()) for name in names], errors.__getitem__)
        assert errors[kept] <= TOLERANCE
        assert all(errors[kept - {name}] > TOLERANCE for name in kept)


def test_what_is_found_costs_little_more_than_the_best() -> None:
    """By brute force, with scores that are wrong by up to a factor of 1.5; in few evaluations."""
    ratios, counts = [], []
    for seed in range(30):
        draw = random.Random(seed)
        squares = {f"op{i}": math.exp(draw.gauss(0, 1)) for i in range(10)}
        work = {name: draw.random() ** 3 for name in squares}
        whole = sum(work.values())
        candidates = [
            Candidate(
                name,
                score=math.sqrt(square) * 1.5 ** draw.uniform(-1, 1),
                benefit=work[name] / whole,
            )
            for name, square in squares.items()
        ]

        def error(kept: Kept, squares: dict[str, float] = squares) -> float:
            return math.sqrt(sum(square for name, square in squares.items() if name not in kept))

        def cost(kept: Kept, candidates: list[Candidate] = candidates) -> float:
            return 0.01 + sum(each.cost for each in candidates if each.name in kept)

        tolerance = draw.uniform(0.4, 0.8) * error(frozenset())
        kept, evaluated = run(candidates, error, tolerance)
        assert error(kept) <= tolerance
        sets = [frozenset(s) for n in range(11) for s in itertools.combinations(squares, n)]
        ratios.append(cost(kept) / min(cost(each) for each in sets if error(each) <= tolerance))
        counts.append(len(evaluated))
    assert statistics.mean(ratios) <= 1.1
    assert max(counts) <= 24
