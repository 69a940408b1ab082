"""Runs searches: asks for errors, of the journal, of what is known, here or in other processes; shows how it goes."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pickle
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Executor, Future
from typing import Any, Final, Protocol

from ..errors import HmpxError, OptionError, said_by
from ..observers import LOGGER
from .asking import Evaluation, Outcome, Search, Seen
from .batches import FRESH, TUNING
from .candidates import Kept
from .evaluating import Task
from .journal import Journal


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


#: What a worker evaluates: the set, its inputs, the tolerance.
Work = tuple[Kept, str, float]

#: In a worker: token -> task. One search at a time has a worker.
_TASKS: Final[dict[str, Task]] = {}

#: How many evaluations are under way at once, at most.
MOST_AT_ONCE: Final = 8


def evaluate(token: str, payload: bytes | None, work: Work) -> Outcome | None:
    """Returns an outcome, in a worker; None if the worker has no such task yet, and gets none here."""
    task = _TASKS.get(token)
    if task is None:
        if payload is None:
            return None
        task = pickle.loads(payload)
        _TASKS.clear()
        _TASKS[token] = task
    return task.outcome(*work)


class Workers:
    """Evaluates by an executor, and ahead of what is asked for."""

    def __init__(self, executor: Executor, task: Task) -> None:
        """Pickles the task.

        Raises:
            OptionError: It can't be pickled.
        """
        try:
            self._payload = pickle.dumps(task)
        except Exception as error:
            raise OptionError(
                f"the model, its inputs or a function can't be sent to other processes: {said_by(error)}; "
                "define functions at the top of a module, or leave out executor"
            ) from error
        self._executor, self._token = executor, uuid.uuid4().hex
        self._under_way: dict[Work, Future[Outcome | None]] = {}

    def outcome(
        self, work: Work, ahead: Iterable[Work], note: Callable[[Work, Outcome], None]
    ) -> Outcome:
        """Returns the outcome of ``work``, and has ``ahead`` evaluated meanwhile.

        Args:
            work: What is asked for.
            ahead: What may be asked for next.
            note: Takes each result of other work that has come in meanwhile.
        """
        for each in (work, *ahead):
            if each not in self._under_way and len(self._under_way) < MOST_AT_ONCE:
                self._under_way[each] = self._submit(None, each)
        if work not in self._under_way:
            self._under_way[work] = self._submit(None, work)
        found = self._result(work)
        for each in [each for each, future in self._under_way.items() if future.done()]:
            other = self._result(each)
            note(each, other)
        return found

    def _submit(self, payload: bytes | None, work: Work) -> Future[Outcome | None]:
        return self._executor.submit(evaluate, self._token, payload, work)

    def _result(self, work: Work) -> Outcome:
        future = self._under_way.pop(work)
        try:
            found = future.result()
            while found is None:
                found = self._submit(self._payload, work).result()
        except (CancelledError, pickle.PicklingError) as error:
            raise OptionError(f"the executor failed: {said_by(error)}") from error
        return found

    def close(self) -> None:
        """Cancels what nobody will ask for."""
        for future in self._under_way.values():
            future.cancel()
        self._under_way.clear()


class Progress(Protocol):
    """Takes each evaluation."""

    def __call__(self, number: int, evaluation: Evaluation, candidates: int, /) -> None:
        """Shows the state of the search."""


@contextlib.contextmanager
def progress(*, is_shown: bool) -> Iterator[Progress]:
    """Yields what shows evaluations, until the end of the block."""
    if is_shown and (display := _display_of_notebook()) is not None:
        yield _Line(display)
        return
    if not is_shown or not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield _log
        return
    rich: Any = importlib.import_module("rich.console")
    with rich.Console(stderr=True).status("tune") as status:

        def show(number: int, evaluation: Evaluation, candidates: int) -> None:
            _log(number, evaluation, candidates)
            status.update(_line(number, evaluation, candidates))

        yield show


class _Line:
    """One line below a notebook's cell, which each evaluation replaces."""

    def __init__(self, display: Any) -> None:
        self._display = display
        self._shown: Any = None

    def __call__(self, number: int, evaluation: Evaluation, candidates: int) -> None:
        _log(number, evaluation, candidates)
        data = {"text/plain": _line(number, evaluation, candidates)}
        if self._shown is None:
            self._shown = self._display(data, raw=True, display_id=True)
        else:
            self._shown.update(data, raw=True)


def _display_of_notebook() -> Any:
    """Returns IPython's function that shows something, if this is a notebook; else None."""
    if "ipykernel" not in sys.modules:
        return None
    ipython = importlib.import_module("IPython")
    shell = ipython.get_ipython()
    return importlib.import_module("IPython.display").display if hasattr(shell, "kernel") else None


def _log(number: int, evaluation: Evaluation, candidates: int) -> None:
    LOGGER.info("%s", _line(number, evaluation, candidates))


def _line(number: int, evaluation: Evaluation, candidates: int) -> str:
    verdict = "passes" if evaluation.passed else "fails"
    return (
        f"tune: evaluation {number}, {evaluation.phase}: {len(evaluation.kept)} of {candidates} in fp32, "
        f"error {evaluation.error:.3g} {verdict}"
    )
