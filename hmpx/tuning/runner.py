"""Runs searches: asks for errors, of the journal, of what is known, here or in other processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from ..errors import HmpxError
from .asking import Search
from .candidates import Kept
from .evaluating import FRESH, TUNING
from .evaluation import Evaluation, Outcome, Seen
from .journal import Journal
from .working import Work


class BudgetError(HmpxError):
    """No more evaluations are allowed."""


class Evaluator(Protocol):
    """Something that evaluates."""

    def outcome(
        self, work: Work, ahead: Iterable[Work], note: Callable[[Work, Outcome], None], /
    ) -> Outcome:
        """Returns an outcome; may call ``note`` with others that it has come by."""


class Runner:
    """Answers what searches ask, each set once.

    Attributes:
        path: The evaluations that were asked for, each once.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        journal: Journal,
        budget: int,
        show: Callable[[int, Evaluation], object],
        *,
        is_noisy: bool = False,
    ) -> None:
        """Knows what the journal knows.

        Args:
            evaluator: What evaluates.
            journal: Where results are kept.
            budget: Most evaluations.
            show: Takes the number and the evaluation, as they come in.
            is_noisy: An error depends on the tolerance, which says how often it is sampled.
        """
        self._evaluator, self._journal, self._budget, self._show = evaluator, journal, budget, show
        self._is_noisy = is_noisy
        self._known: dict[Work, Outcome] = dict(journal.parsed("kept", outcome_from_record))
        self._asked: set[Work] = set()
        self.path: list[Evaluation] = []

    @property
    def evaluations(self) -> int:
        """How many sets were asked for."""
        return len(self._asked)

    def search(self, search: Search, tolerance: float) -> Kept:
        """Returns what a search returns.

        Raises:
            BudgetError: It needs more evaluations than are allowed.
        """
        try:
            asked = next(search)
            while True:
                found = self.outcome(asked.kept, asked.phase, tolerance, ahead=asked.ahead)
                asked = search.send(found)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        finally:
            search.close()

    def error(self, kept: Kept, phase: str, tolerance: float, *, is_fresh: bool = False) -> float:
        """Returns the error of a set.

        Raises:
            BudgetError: No more evaluations are allowed.
        """
        return self.outcome(kept, phase, tolerance, is_fresh=is_fresh).error

    def outcome(
        self,
        kept: Kept,
        phase: str,
        tolerance: float,
        *,
        is_fresh: bool = False,
        ahead: Iterable[Kept] = (),
    ) -> Outcome:
        """Returns the outcome of a set.

        Raises:
            BudgetError: No more evaluations are allowed.
        """
        inputs = FRESH if is_fresh else TUNING
        work = self._work(kept, inputs, tolerance)
        if work not in self._asked and self.evaluations >= self._budget:
            raise BudgetError(f"{self._budget} evaluations were not enough")
        if work not in self._known:
            others = [self._work(each, inputs, tolerance) for each in ahead]
            wanted = [each for each in others if each not in self._known]
            self._note(work, self._evaluator.outcome(work, wanted, self._note))
        found = self._known[work]
        if work not in self._asked:
            self._asked.add(work)
            evaluation = Evaluation(kept, phase, found.error, found.error <= tolerance)
            self.path.append(evaluation)
            self._show(self.evaluations, evaluation)
        return found

    def known(self, kept: Kept, tolerance: float) -> Outcome | None:
        """Returns the outcome of a set that was asked for; None if it was not."""
        work = self._work(kept, TUNING, tolerance)
        return self._known[work] if work in self._asked else None

    def _work(self, kept: Kept, inputs: str, tolerance: float) -> Work:
        return kept, inputs, tolerance if self._is_noisy else 0.0

    def _note(self, work: Work, outcome: Outcome) -> None:
        if work in self._known:
            return
        self._known[work] = outcome
        kept, inputs, tolerance = work
        record = {"kept": sorted(kept), "inputs": inputs, "tolerance": tolerance}
        self._journal.write(
            {**record, "error": outcome.error, "seen": {k: [*v] for k, v in outcome.seen.items()}}
        )


def outcome_from_record(record: Mapping[str, Any]) -> tuple[Work, Outcome]:
    """Parses a journal record into a set and its outcome."""
    work = frozenset(map(str, record["kept"])), str(record["inputs"]), float(record["tolerance"])
    seen = {name: Seen(*map(float, each)) for name, each in record["seen"].items()}
    return work, Outcome(float(record["error"]), seen)
