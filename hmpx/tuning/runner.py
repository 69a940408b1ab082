"""Runs searches: gets outcomes from the journal, here or from other processes, and shows progress."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..errors import HmpxError, OptionError
from ..observers import LOGGER
from .candidates import COST_OF_A_LINE, Candidate, Evaluation, Kept, Outcome, Seen, bare, low_parts
from .evaluating import LEAST_OVER_NOISE, Evaluator, Work
from .journal import Journal
from .request import FRESH, TUNING
from .result import Tuned
from .search import Evaluate, Search


class BudgetError(HmpxError):
    """The budget of evaluations is spent."""


class Runner:
    """Returns the outcomes that searches request, and evaluates each set once.

    Attributes:
        path: The evaluations requested, each once.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        journal: Journal,
        budget: int,
        show: Callable[[str], object],
        *,
        count: int = 0,
        is_noisy: bool = False,
    ) -> None:
        """Starts from the journal's results.

        Args:
            evaluator: Evaluates sets.
            journal: Stores results.
            budget: Most evaluations.
            show: Takes a line on each evaluation as it completes.
            count: Number of candidates, for that line.
            is_noisy: Whether errors depend on the tolerance, which determines the number of samples.
        """
        self._evaluator, self._journal, self._budget, self._show = evaluator, journal, budget, show
        self._count, self._is_noisy = count, is_noisy
        self._known: dict[Work, Outcome] = dict(journal.parsed["kept"])
        self._asked: set[Work] = set()
        self.path: list[Evaluation] = []

    @property
    def evaluations(self) -> int:
        """Number of sets requested."""
        return len(self._asked)

    def outcome(
        self,
        kept: Kept,
        phase: str,
        tolerance: float,
        *,
        inputs: str = TUNING,
        ahead: Iterable[Kept] = (),
    ) -> Outcome:
        """Returns the outcome of a set.

        Raises:
            BudgetError: The budget is spent.
        """
        work = self._work(kept, inputs, tolerance)
        if work not in self._asked and self.evaluations >= self._budget:
            raise BudgetError(f"{self._budget} evaluations were not enough")
        if work not in self._known:
            others = [self._work(each, inputs, tolerance) for each in ahead]
            wanted = [each for each in others if each not in self._known]
            for each, found in self._evaluator(work, wanted).items():
                self._note(each, found)
        found = self._known[work]
        if work not in self._asked:
            self._asked.add(work)
            self.path.append(Evaluation(kept, phase, found.error, found.error <= tolerance))
            verdict = "passes" if found.error <= tolerance else "fails"
            self._show(
                f"tune: evaluation {self.evaluations}, {phase}: {len(kept)} of {self._count} in "
                f"fp32, error {found.error:.3g} {verdict}"
            )
        return found

    def known(self, kept: Kept, tolerance: float) -> Outcome | None:
        """Returns the outcome of a set requested before, or None."""
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
        self._journal.write({**record, "error": outcome.error, "seen": outcome.seen})


def outcome_from_record(record: Mapping[str, Any]) -> tuple[Work, Outcome]:
    """Parses a journal record into a set and its outcome."""
    work = frozenset(map(str, record["kept"])), str(record["inputs"]), float(record["tolerance"])
    seen = {name: Seen(*map(float, each)) for name, each in record["seen"].items()}
    return work, Outcome(float(record["error"]), seen)


# --- the whole search -------------------------------------------------------------------------------

#: Searches among candidates, at a tolerance, with a function that evaluates sets.
Find = Callable[[Sequence[Candidate], float, Evaluate], Kept]

#: Factor for the tolerance after a set fails on fresh inputs, and the most retries.
_TIGHTER: Final = 0.7
_MOST_ROUNDS: Final = 8


@dataclass
class Searching:
    """One whole search.

    Attributes:
        runner: Evaluates sets.
        candidates: All candidates.
        tolerance: The largest error allowed.
        metric: Name of the metric.
        low_type: Name of the low-precision type.
        limit: The limit on the choice of types, as text.
        find: Searches among candidates.
        has_fresh: Whether fresh inputs check the set at the end.
        noise: The error of fp32 against itself.
    """

    runner: Runner
    candidates: Sequence[Candidate]
    tolerance: float
    metric: str = ""
    low_type: str = ""
    limit: str = ""
    find: Find = lambda *args: Search(*args).run()
    has_fresh: bool = False
    noise: float = 0.0

    def run(self) -> Tuned:
        """Runs the search. After Ctrl-C, or once the budget is spent, returns the best set so far.

        Raises:
            OptionError: The error is too large with every op in fp32.
        """
        everything = frozenset(each.name for each in self.candidates)
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

        return self.find(self.candidates, tolerance, evaluate)

    def _best(self, everything: Kept) -> Kept:
        """Returns the set with the lowest cost that has passed."""
        known = {each.name: each for each in self.candidates}

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
            candidates=tuple(self.candidates),
            limit=self.limit,
            searched=searched,
            seen={} if outcome is None else outcome.seen,
        )


# --- progress ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def progress(*, is_shown: bool) -> Iterator[Callable[[str], None]]:
    """Yields a function that logs a line, and shows it in a notebook or on a terminal with `rich`."""
    with contextlib.ExitStack() as stack:
        update = _display(stack) if is_shown else None

        def show(line: str) -> None:
            LOGGER.info("%s", line)
            if update is not None:
                update(line)

        yield show


def _display(stack: contextlib.ExitStack) -> Callable[[str], object] | None:
    """Returns a function that replaces the line shown; None if nothing can show it."""
    if "ipykernel" in sys.modules:
        ipython = importlib.import_module("IPython")
        if hasattr(ipython.get_ipython(), "kernel"):
            display = importlib.import_module("IPython.display").display
            shown = display({"text/plain": "tune"}, raw=True, display_id=True)
            return lambda line: shown.update({"text/plain": line}, raw=True)
    if sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
        rich: Any = importlib.import_module("rich.console")
        return stack.enter_context(rich.Console(stderr=True).status("tune")).update  # type: ignore[no-any-return]
    return None
