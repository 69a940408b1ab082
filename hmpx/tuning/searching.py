"""From the ground to a set that holds: fp32 passes, the search, modules inside what is kept, fresh inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from ..errors import OptionError
from .candidates import COST_OF_A_LINE, Candidate, Costs, Kept, Outcome, bare, low_parts, split
from .evaluating import LEAST_OVER_NOISE
from .request import FRESH, TUNING
from .result import Tuned
from .runner import BudgetError, Runner
from .search import Evaluate, Search

#: Searches among candidates, at a tolerance, by what evaluates sets.
Find = Callable[[Sequence[Candidate], float, Evaluate], Kept]

#: What the tolerance is multiplied by where a set fails on fresh inputs, and how often.
_TIGHTER: Final = 0.7
_MOST_ROUNDS: Final = 8


@dataclass
class Searching:
    """One search, from the ground on.

    Attributes:
        runner: What evaluates.
        coarse: The candidates.
        tolerance: The largest error that passes.
        metric: Name of the metric.
        low_type: Name of the low-precision type.
        limit: What the choice of types is limited to, as text.
        find: Searches among candidates.
        finer: Where modules inside of what is kept are searched, too: what all spots cost.
        has_fresh: Whether there are inputs that the set is checked on at the end.
        noise: The error of fp32 against itself.
    """

    runner: Runner
    coarse: Sequence[Candidate]
    tolerance: float
    metric: str = ""
    low_type: str = ""
    limit: str = ""
    find: Find = lambda *args: Search(*args).run()
    finer: Costs = field(default_factory=dict)
    has_fresh: bool = False
    noise: float = 0.0

    def run(self) -> Tuned:
        """Returns what is found; after Ctrl-C, or when the budget is spent, the best so far.

        Raises:
            OptionError: The error is too large with every op in fp32.
        """
        everything = frozenset(each.name for each in self.coarse)
        error = self._error(everything, "all fp32")
        if not error <= self.tolerance:
            raise OptionError(
                f"with every op in fp32 the error is {error:.3g}, above the tolerance {self.tolerance:g}: "
                "no list can pass; does the program convert to low precision itself, or draw random "
                "numbers that no seed sets?"
            )
        try:
            return self._checked(everything)
        except BudgetError:
            return self._tuned(self._best(everything), "budget")
        except KeyboardInterrupt:
            return self._tuned(self._best(everything), "interrupt")

    def _error(self, kept: Kept, phase: str, inputs: str = TUNING) -> float:
        return self.runner.outcome(kept, phase, self.tolerance, inputs=inputs).error

    def _checked(self, everything: Kept) -> Tuned:
        """Returns a set that also passes on fresh inputs."""
        tolerance = self.tolerance
        for _ in range(_MOST_ROUNDS):
            kept = self._set_within(tolerance)
            if not self.has_fresh:
                return self._tuned(kept)
            error = self._error(kept, "fresh inputs", FRESH)
            if error <= self.tolerance:
                searched = tolerance if tolerance < self.tolerance else None
                return self._tuned(kept, fresh_error=error, searched=searched)
            tolerance *= _TIGHTER
            if tolerance <= LEAST_OVER_NOISE * self.noise:
                break
        error = self._error(everything, "fresh inputs", FRESH)
        if not error <= self.tolerance:
            raise OptionError(
                f"on fresh inputs the error is {error:.3g} with every op in fp32, above the tolerance "
                f"{self.tolerance:g}"
            )
        return self._tuned(everything, "fresh inputs", fresh_error=error)

    def _set_within(self, tolerance: float) -> Kept:
        def evaluate(kept: Kept, phase: str, ahead: Sequence[Kept]) -> Outcome:
            return self.runner.outcome(kept, phase, tolerance, ahead=ahead)

        kept = self.find(self.coarse, tolerance, evaluate)
        if not self.finer or not kept:
            return kept
        others = {each.name for each in self.coarse} - kept
        parts = [each for each in self._refined(kept) if each.name not in others]
        return self.find(parts, tolerance, evaluate)

    def _refined(self, kept: Kept) -> list[Candidate]:
        """Returns the candidates with those that are kept, or have a part that is, split by module."""
        ops = {bare(name).rpartition(":")[2] for name in kept}
        found = []
        for each in self.coarse:
            found += split([each], self.finer) if each.name in ops else [each]
        return found

    def _best(self, everything: Kept) -> Kept:
        """Returns the set that loses least of those that have passed."""
        known = {each.name: each for each in (*split(self.coarse, self.finer), *self.coarse)}

        def cost(kept: Kept) -> tuple[float, int, list[str]]:
            outcome = self.runner.known(kept, self.tolerance)
            members = [known[bare(member)] for member in kept]
            lost = COST_OF_A_LINE * len(kept)
            for each in members:
                part = low_parts(each, kept, {} if outcome is None else outcome.seen)[1]
                lost += each.benefit * (1 - part)
            return lost, len(kept), sorted(kept)

        passed = [
            each.kept
            for each in self.runner.path
            if each.error <= self.tolerance and each.phase != "fresh inputs"
        ]
        return min(passed, key=cost, default=everything)

    def _tuned(
        self,
        kept: Kept,
        stopped_by: str = "",
        *,
        fresh_error: float | None = None,
        searched: float | None = None,
    ) -> Tuned:
        runner = self.runner
        outcome = runner.known(kept, self.tolerance)
        low = [each.error for each in runner.path if not each.kept]
        is_coarse = {bare(member) for member in kept} <= {each.name for each in self.coarse}
        return Tuned(
            kept=kept,
            error=math.nan if outcome is None else outcome.error,
            all_low_error=low[0] if low else math.nan,
            fresh_error=fresh_error,
            tolerance=self.tolerance,
            noise=self.noise,
            metric=self.metric,
            low_precision_type=self.low_type,
            evaluations=runner.evaluations,
            is_complete=not stopped_by,
            stopped_by=stopped_by,
            path=tuple(runner.path),
            candidates=tuple(self.coarse if is_coarse else self._refined(kept)),
            limit=self.limit,
            searched=searched,
            seen={} if outcome is None else outcome.seen,
        )
