"""Simulated models: what each candidate adds to the error, known beforehand."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hmpx.tuning.candidates import Candidate, Kept, LowShares, Outcome
from hmpx.tuning.search import Evaluator, Journal, Search

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


class Simulated(Evaluator):
    """What a search asks, answered by a function of sets."""

    budget = 1_000

    def __init__(
        self,
        candidates: Iterable[Candidate],
        evaluate: Callable[[Kept], Outcome],
        shipped: Iterable[Kept] = (),
    ) -> None:
        self.candidates, self.shipped, self._evaluate = [*candidates], shipped, evaluate

    def outcome(self, kept: Kept, inputs: str, tolerance: float) -> Outcome:
        """Returns the function's outcome."""
        return self._evaluate(kept)


def run(
    candidates: Iterable[Candidate],
    error: Callable[[Kept], float],
    tolerance: float = TOLERANCE,
) -> tuple[Kept, list[Kept]]:
    """Returns what a search finds, and the sets that it had evaluated, each once."""
    known: list[Kept] = []

    def evaluate(kept: Kept) -> Outcome:
        known.append(kept)
        return Outcome(error(kept))

    found = Search(Simulated(candidates, evaluate), Journal("", {})).minimal(tolerance)
    assert len(set(known)) == len(known)
    return found, known


@dataclass(frozen=True)
class Call:
    """One call of a simulated program.

    Attributes:
        op: The candidate that it is of.
        inputs: The calls whose results it is given; an input of the program, in fp32, where there are none.
        square: The squared error that it adds in low precision.
        work: What it costs.
    """

    op: str
    inputs: tuple[int, ...]
    square: float
    work: float


@dataclass(frozen=True)
class Flow:
    """A program whose calls take each other's results: what follows depends on what it is given."""

    calls: tuple[Call, ...]

    @property
    def names(self) -> list[str]:
        """The candidates."""
        return sorted({each.op for each in self.calls})

    def low(self, kept: Kept) -> tuple[list[bool], list[bool]]:
        """Returns whether each call computes in low precision, and whether it is given nothing else."""
        found: list[bool] = []
        given: list[bool] = []
        for each in self.calls:
            given.append(bool(each.inputs) and all(found[i] for i in each.inputs))
            follows = f"{each.op}=follows" in kept
            found.append(given[-1] if follows else each.op not in kept)
        return found, given

    def outcome(self, kept: Kept) -> Outcome:
        """Returns the error, and what is seen."""
        low, given = self.low(kept)
        square = sum(each.square for each, is_low in zip(self.calls, low, strict=True) if is_low)
        seen = {}
        for name in self.names:
            parts = [self._share(name, which) for which in (low, low, given)]
            seen[name] = LowShares(*parts)
        return Outcome(math.sqrt(square), seen)

    def _share(self, name: str, which: list[bool]) -> float:
        own = [
            (each.work, is_so)
            for each, is_so in zip(self.calls, which, strict=True)
            if each.op == name
        ]
        return sum(work for work, is_so in own if is_so) / sum(work for work, _ in own)

    def kept_work(self, kept: Kept) -> float:
        """Returns the share of the work that is in fp32."""
        low, _ = self.low(kept)
        wide = sum(each.work for each, is_low in zip(self.calls, low, strict=True) if not is_low)
        return wide / sum(each.work for each in self.calls)

    def candidates(self) -> list[Candidate]:
        """Returns the candidates, with the scores that a comparison would find."""
        whole = sum(each.work for each in self.calls)
        found = []
        for name in self.names:
            own = [each for each in self.calls if each.op == name]
            work = sum(each.work for each in own)
            found.append(
                Candidate(
                    name,
                    score=math.sqrt(sum(each.square for each in own)),
                    flops=int(1000 * work),
                    bytes=int(1000 * work),
                    benefit=work / whole,
                    may_follow=True,
                )
            )
        return found


def flow(seed: int, ops: int = 6, count: int = 24) -> Flow:
    """Returns a random program, in which each op has several calls."""
    draw = random.Random(seed)
    names = [f"op{i}" for i in range(ops)]
    calls: list[Call] = []
    for index in range(count):
        op = names[index] if index < ops else draw.choice(names)
        before = range(max(0, index - 4), index)
        inputs = tuple(sorted(draw.sample(before, min(len(before), draw.choice((0, 1, 1, 2))))))
        calls.append(Call(op, inputs, math.exp(draw.gauss(-2, 1)), draw.choice((1, 1, 2, 8))))
    return Flow(tuple(calls))


def run_flow(
    program: Flow, tolerance: float, shipped: Iterable[Kept] = ()
) -> tuple[Kept, list[Kept]]:
    """Returns what a search finds, and the sets that it had evaluated, each once."""
    known: list[Kept] = []

    def evaluate(kept: Kept) -> Outcome:
        known.append(kept)
        return program.outcome(kept)

    asked = Simulated(program.candidates(), evaluate, shipped)
    return Search(asked, Journal("", {})).minimal(tolerance), known
