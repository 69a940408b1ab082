"""Runs searches: answers what they ask from the journal, here or in other processes, and shows how it goes."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pickle
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Executor, Future
from typing import Any, Final

from ..errors import HmpxError, OptionError, said_by
from ..observers import LOGGER
from .candidates import Evaluation, Kept, Outcome, Seen
from .evaluating import Task
from .journal import Journal
from .request import TUNING

#: What is evaluated: the set, its inputs, the tolerance.
Work = tuple[Kept, str, float]

#: Takes a work and others that may be asked for next; returns the outcome of it, and of others that are done.
Evaluator = Callable[[Work, Sequence[Work]], Mapping[Work, Outcome]]


class BudgetError(HmpxError):
    """No more evaluations are allowed."""


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
        show: Callable[[str], object],
        *,
        count: int = 0,
        is_noisy: bool = False,
    ) -> None:
        """Knows what the journal knows.

        Args:
            evaluator: What evaluates.
            journal: Where results are kept.
            budget: Most evaluations.
            show: Takes a line on each evaluation, as they come in.
            count: How many candidates there are, for that line.
            is_noisy: An error depends on the tolerance, which says how often it is sampled.
        """
        self._evaluator, self._journal, self._budget, self._show = evaluator, journal, budget, show
        self._count, self._is_noisy = count, is_noisy
        self._known: dict[Work, Outcome] = dict(journal.parsed["kept"])
        self._asked: set[Work] = set()
        self.path: list[Evaluation] = []

    @property
    def evaluations(self) -> int:
        """How many sets were asked for."""
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
            BudgetError: No more evaluations are allowed.
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
        self._journal.write({**record, "error": outcome.error, "seen": outcome.seen})


def outcome_from_record(record: Mapping[str, Any]) -> tuple[Work, Outcome]:
    """Parses a journal record into a set and its outcome."""
    work = frozenset(map(str, record["kept"])), str(record["inputs"]), float(record["tolerance"])
    seen = {name: Seen(*map(float, each)) for name, each in record["seen"].items()}
    return work, Outcome(float(record["error"]), seen)


# --- executors ---------------------------------------------------------------------------------------

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

    def __call__(self, work: Work, ahead: Sequence[Work], /) -> Mapping[Work, Outcome]:
        """Returns the outcome of ``work``, has ``ahead`` evaluated meanwhile, and returns what is done of that."""
        for each in (work, *ahead):
            if each not in self._under_way and (
                each == work or len(self._under_way) < MOST_AT_ONCE
            ):
                self._under_way[each] = self._submit(None, each)
        found = {work: self._result(work)}
        for each in [each for each, future in self._under_way.items() if future.done()]:
            found[each] = self._result(each)
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


# --- progress ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def progress(*, is_shown: bool) -> Iterator[Callable[[str], None]]:
    """Yields what logs a line, and shows it in a notebook or on a terminal with `rich`, until the block ends."""
    with contextlib.ExitStack() as stack:
        update = _display(stack) if is_shown else None

        def show(line: str) -> None:
            LOGGER.info("%s", line)
            if update is not None:
                update(line)

        yield show


def _display(stack: contextlib.ExitStack) -> Callable[[str], object] | None:
    """Returns what replaces a line that is shown; None if nothing can show it."""
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
