"""Simulated models: what each candidate adds to the error, known beforehand."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hmpx.tuning.candidates import Candidate, Kept
from hmpx.tuning.search import search

TOLERANCE = 1.0


@dataclass(frozen=True)
class Oracle:
    """A model whose errors add up as independent ones do, beside a pair that is harmful together."""

    candidates: list[Candidate]
    true: dict[str, float]
    culprits: frozenset[str]
    pair: frozenset[str]

    def error(self, kept: Kept) -> float:
        """Returns the error with ``kept`` in fp32."""
        rest = math.sqrt(sum(self.true[name] ** 2 for name in self.true if name not in kept))
        return max(rest, 3.0) if self.pair and not self.pair & kept else rest


def oracle(
    n: int, k: int, *, seed: int, off: float = 2.0, pair: bool = False, hard: int = 0
) -> Oracle:
    """Returns a model of ``n`` candidates, ``k`` of which have to stay in fp32.

    Args:
        n: How many candidates.
        k: How many culprits.
        seed: What is drawn.
        off: By which factor scores are wrong, one standard deviation.
        pair: Two more are harmful together only, unknown to the scores.
        hard: How many of the culprits overflow.
    """
    draw = random.Random(seed)
    names = [f"op{i}" for i in range(n)]
    culprits = draw.sample(names, k)
    rest = [name for name in names if name not in culprits]
    together = frozenset(draw.sample(rest, 2)) if pair else frozenset()
    true = dict.fromkeys(rest, 0.0)
    for name in rest:
        true[name] = 0.05 * draw.random() / math.sqrt(n / 20)
    for name in culprits:
        true[name] = draw.uniform(2, 10)
    for name in culprits[:hard]:
        true[name] = math.inf
    candidates = [
        Candidate(
            name,
            score=0.0
            if math.isinf(true[name])
            else true[name] * math.exp(draw.gauss(0, math.log(off))),
            benefit=draw.random() / n,
            is_hard=math.isinf(true[name]),
        )
        for name in names
    ]
    return Oracle(candidates, true, frozenset(culprits), together)


def run(
    candidates: Iterable[Candidate],
    error: Callable[[Kept], float],
    tolerance: float = TOLERANCE,
) -> tuple[Kept, list[Kept]]:
    """Returns what a search finds, and the sets that it had evaluated, each once."""
    known: dict[Kept, float] = {}
    going = search(list(candidates), tolerance)
    try:
        asked = next(going)
        while True:
            if asked.kept not in known:
                known[asked.kept] = error(asked.kept)
            asked = going.send(known[asked.kept])
    except StopIteration as done:
        return done.value, list(known)
