"""What sets cost beside the best set there is, and effects that are calibrated on what was measured."""

from __future__ import annotations

import itertools
import math
import random
import statistics

from hmpx.tuning.candidates import COST_OF_A_LINE, Candidate, Kept

from .oracles import run


def error_of(squares: dict[str, float], kept: Kept) -> float:
    return math.sqrt(sum(square for name, square in squares.items() if name not in kept))


def candidates_of(squares: dict[str, float], work: dict[str, float], off: float, seed: int):
    draw = random.Random(seed)
    return [
        Candidate(
            name, score=math.sqrt(squares[name]) * off ** draw.uniform(-1, 1), benefit=work[name]
        )
        for name in squares
    ]


def cost_of(candidates: list[Candidate], kept: Kept) -> float:
    return sum(each.benefit + COST_OF_A_LINE for each in candidates if each.name in kept)


def cheapest(candidates: list[Candidate], squares: dict[str, float], tolerance: float) -> float:
    names = list(squares)
    sets = itertools.chain(*(itertools.combinations(names, n) for n in range(len(names) + 1)))
    return min(
        cost_of(candidates, frozenset(each))
        for each in sets
        if error_of(squares, frozenset(each)) <= tolerance
    )


def test_what_is_found_costs_little_more_than_the_best() -> None:
    """By brute force, with scores that are wrong by up to a factor of 1.5; in few evaluations."""
    ratios, counts = [], []
    for seed in range(30):
        draw = random.Random(seed)
        squares = {f"op{i}": math.exp(draw.gauss(0, 1)) for i in range(10)}
        work = {name: draw.random() ** 3 for name in squares}
        work = {name: share / sum(work.values()) for name, share in work.items()}
        candidates = candidates_of(squares, work, 1.5, seed)
        tolerance = draw.uniform(0.4, 0.8) * error_of(squares, frozenset())

        def error(kept: Kept, squares: dict[str, float] = squares) -> float:
            return error_of(squares, kept)

        kept, evaluated = run(candidates, error, tolerance)
        assert error(kept) <= tolerance
        assert all(error(kept - {name}) > tolerance for name in kept)
        ratios.append(
            (cost_of(candidates, kept) + 0.01) / (cheapest(candidates, squares, tolerance) + 0.01)
        )
        counts.append(len(evaluated))
    assert statistics.mean(ratios) <= 1.1
    assert max(counts) <= 24


def test_infinite_errors_and_effects_that_are_not_known() -> None:
    """Are no exception: what makes an error infinite stays."""
    candidates = [
        Candidate("exp", score=0.0, benefit=0.5, is_hard=True),
        Candidate("sin", score=0.0, benefit=0.3, is_unseen=True),
        Candidate("linear", score=1.0, benefit=0.2),
    ]

    def error(kept: Kept) -> float:
        return 0.1 if "exp" in kept else math.inf

    kept, _ = run(candidates, error, 0.5)
    assert kept == {"exp"}
