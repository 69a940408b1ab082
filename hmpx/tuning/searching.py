"""From the ground to a set that holds: fp32 passes, the search, modules inside what is kept, fresh inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ..errors import OptionError
from .asking import Search, low_parts
from .candidates import COST_OF_A_LINE, Candidate, Kept, Spot, bare, split
from .runner import BudgetError, Runner
from .search import search

#: The least tolerance, as a multiple of the error of fp32 against itself.
LEAST_OVER_NOISE: Final = 3

#: What the tolerance is multiplied by where a set fails on fresh inputs, and how often.
_TIGHTER: Final = 0.7
_MOST_ROUNDS: Final = 8


@dataclass(frozen=True)
class Found:
    """What was found.

    Attributes:
        kept: The set.
        candidates: What it is a part of.
        stopped_by: ``"budget"``, ``"interrupt"``; ``"fresh inputs"`` if each smaller set failed on them; ``""``
            if the search came to its end.
        fresh_error: Its error on fresh inputs; None if it was not tried on any.
        searched: The tolerance of the search: below the one asked for where a set failed on fresh inputs.
            None if that is the same.
    """

    kept: Kept
    candidates: tuple[Candidate, ...]
    stopped_by: str
    fresh_error: float | None
    searched: float | None = None


@dataclass
class Searching:
    """One search, from the ground on.

    Attributes:
        runner: What evaluates.
        coarse: The candidates.
        spots: What these stand for, with costs.
        tolerance: The largest error that passes.
        is_finer: Whether modules inside of what is kept are searched, too.
        has_fresh: Whether there are inputs that the set is checked on at the end.
        noise: The error of fp32 against itself.
        make: Makes a search for candidates and a tolerance.
    """

    runner: Runner
    coarse: Sequence[Candidate]
    spots: dict[Spot, tuple[int, int]]
    tolerance: float
    is_finer: bool = False
    has_fresh: bool = False
    noise: float = 0.0
    make: Callable[[Sequence[Candidate], float], Search] = search

    def run(self) -> Found:
        """Returns what is found; after Ctrl-C, or when the budget is spent, the best so far.

        Raises:
            OptionError: The error is too large with every op in fp32.
        """
        everything = frozenset(each.name for each in self.coarse)
        self._check_ground(everything)
        try:
            return self._checked(everything)
        except BudgetError:
            return self._best(everything, "budget")
        except KeyboardInterrupt:
            return self._best(everything, "interrupt")

    def _check_ground(self, everything: Kept) -> None:
        error = self.runner.error(everything, "all fp32", self.tolerance)
        if not error <= self.tolerance:
            raise OptionError(
                f"with every op in fp32 the error is {error:.3g}, above the tolerance {self.tolerance:g}: "
                "no list can pass; does the program convert to low precision itself, or draw random "
                "numbers that no seed sets?"
            )

    def _checked(self, everything: Kept) -> Found:
        """Returns a set that also passes on fresh inputs."""
        tolerance = self.tolerance
        for _ in range(_MOST_ROUNDS):
            kept, known = self._set_within(tolerance)
            if not self.has_fresh:
                return Found(kept, known, "", None)
            error = self.runner.error(kept, "fresh inputs", self.tolerance, is_fresh=True)
            if error <= self.tolerance:
                searched = tolerance if tolerance < self.tolerance else None
                return Found(kept, known, "", error, searched)
            tolerance *= _TIGHTER
            if tolerance <= LEAST_OVER_NOISE * self.noise:
                break
        error = self.runner.error(everything, "fresh inputs", self.tolerance, is_fresh=True)
        if not error <= self.tolerance:
            raise OptionError(
                f"on fresh inputs the error is {error:.3g} with every op in fp32, above the tolerance "
                f"{self.tolerance:g}"
            )
        return Found(everything, tuple(self.coarse), "fresh inputs", error)

    def _set_within(self, tolerance: float) -> tuple[Kept, tuple[Candidate, ...]]:
        kept = self.runner.search(self.make(self.coarse, tolerance), tolerance)
        if not self.is_finer or not kept:
            return kept, tuple(self.coarse)
        known = self._refined(kept)
        names = {each.name for each in self.coarse} - kept
        free = [each for each in known if each.name not in names]
        return self.runner.search(self.make(free, tolerance), tolerance), known

    def _refined(self, kept: Kept) -> tuple[Candidate, ...]:
        """Returns the candidates with those that are kept, or have a part that is, split by module."""
        ops = {name.rpartition(":")[2] for name in kept}
        parts = split([each for each in self.coarse if each.name in ops], self.spots)
        return (*(each for each in self.coarse if each.name not in ops), *parts)

    def _best(self, everything: Kept, stopped_by: str) -> Found:
        """Returns the set that loses least of those that have passed."""
        names = {each.name for each in self.coarse}
        passed = [
            each.kept
            for each in self.runner.path
            if each.error <= self.tolerance and each.phase != "fresh inputs"
        ]
        choices = [(kept, self._known(kept, names)) for kept in passed]

        def cost(choice: tuple[Kept, tuple[Candidate, ...]]) -> tuple[float, int, list[str]]:
            kept, known = choice
            outcome = self.runner.known(kept, self.tolerance)
            seen = {} if outcome is None else outcome.seen
            lost = sum(each.benefit * (1 - low_parts(each, kept, seen)[1]) for each in known)
            lost += COST_OF_A_LINE * len(kept)
            return lost, len(kept), sorted(kept)

        kept, known = min(choices, key=cost, default=(everything, tuple(self.coarse)))
        return Found(kept, known, stopped_by, None)

    def _known(self, kept: Kept, names: set[str]) -> tuple[Candidate, ...]:
        return tuple(self.coarse) if _names(kept) <= names else self._refined(kept)


def _names(kept: Kept) -> set[str]:
    """Returns the names of candidates in a set, without the types that they have there."""
    return {bare(each) for each in kept}
