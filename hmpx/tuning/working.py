"""Evaluations in other processes, by any executor: the model is sent once to each worker."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Executor, Future
from typing import Final

from ..errors import OptionError, said_by
from .candidates import Kept
from .evaluating import Task
from .evaluation import Outcome

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
