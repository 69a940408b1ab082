"""Evaluates sets, here or by an executor: runs the model with a set in fp32 and the rest in low precision."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import pickle
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from .. import arguments, session
from ..errors import OptionError, said_by, short, shown
from ..observers import LOGGER, OpCall, attach
from ..policy import Policy
from ..reports import clean
from ..tensors import LOW_DTYPES, Opaque, parts_of, widened
from ..torch_internals import uncompiled
from ..torch_state import disable_casts, unchanged
from . import metrics
from .assignment import assigned, policy_of, reads_first
from .candidates import Candidate, Costs, Kept, Outcome, Seen, Spot
from .request import FRESH, TUNING, Request, seed_all

#: The least tolerance, as a multiple of fp32's error against itself.
LEAST_OVER_NOISE: Final = 3

#: Added to the seed for fresh inputs.
_OTHER_SEED: Final = 1_000

#: A conversion holds for the whole process, so threads take turns.
_TURNS: Final = threading.RLock()


#: An evaluation: the set, its inputs, the tolerance.
Work = tuple[Kept, str, float]

#: Takes a work and others that may follow; returns its outcome, and those of others that are done.
Evaluator = Callable[[Work, Sequence[Work]], Mapping[Work, Outcome]]


@dataclass
class Task:
    """An evaluation's data, which is pickled to other processes.

    Attributes:
        request: The arguments of `tune`.
        candidates: All candidates.
        spots: FLOPs and bytes of the candidates' spots.
        threads: torch's number of threads: sums depend on it.
    """

    request: Request
    candidates: tuple[Candidate, ...] = ()
    spots: Costs = field(default_factory=dict)
    threads: int = field(default_factory=torch.get_num_threads)
    _references: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Excludes the fp32 results, which the other process computes itself."""
        return {**vars(self), "_references": {}}

    def outcome(self, kept: Kept, inputs: str, tolerance: float) -> Outcome:
        """Returns the error with ``kept`` in fp32 (infinite if not finite), and the shares in low precision.

        Args:
            kept: The set.
            inputs: `TUNING` or `FRESH`.
            tolerance: The tolerance that noisy measures are compared with.
        """
        low_type = self.request.low_type
        policy = policy_of(assigned(self.candidates, kept, low_type), low_type)
        with _TURNS, _threads(self.threads):
            if self.request.measure is not None:
                return Outcome(self._measured(policy, inputs, tolerance))
            expected = self.reference(inputs)
            watched = [each for each in self.candidates if each.may_follow]
            observed = _Observed()
            # The observer first, since wrappers are made once and include it.
            with (
                attach(observed, every_op=True) if watched else contextlib.nullcontext(),
                self._converted(policy),
            ):
                try:
                    found = self._outputs(inputs)
                except (RuntimeError, ValueError, ArithmeticError) as error:
                    if isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(
                        error
                    ):
                        raise
                    return Outcome(math.inf)  # the model branches on values that are off
            seen = {each.name: observed.seen(each, self.spots) for each in watched}
            errors = self._errors(found, expected, inputs)
            return Outcome(metrics.limit(errors) if inputs == TUNING else max(errors), seen)

    def reference(self, inputs: str) -> list[Any]:
        """Returns the model's fp32 output for each batch.

        Raises:
            OptionError: The model returns NaN, or no numbers.
        """
        if inputs not in self._references:
            with _TURNS, disable_casts():
                found = self._outputs(inputs)
            if all(
                each.value is None or isinstance(each.value, Opaque) for each in parts_of(found)
            ):
                raise OptionError(
                    f"the model returns {shown(found[0])}, in which tune sees no numbers; return tensors"
                )
            if any(bool(each.isnan().any()) for each in metrics.floating_of(found)):
                raise OptionError(
                    "the model returns NaN in fp32, so that nothing can be compared with it; "
                    "hmpx.watch() finds the op"
                )
            self._references[inputs] = found
        return self._references[inputs]  # type: ignore[no-any-return]

    def noise(self) -> float:
        """Returns fp32's error against itself with another number of threads.

        Raises:
            OptionError: The tolerance is too close to that error.
        """
        if self.request.measure is not None:
            return 0.0
        expected = self.reference(TUNING)
        if self.request.metric == "relative_l2" and (unseen := metrics.unseen_of(expected[0])):
            LOGGER.warning(
                "tune: relative_l2 does not look at %s of what the model returns; a function as metric= can",
                short(clean(", ".join(unseen))),
            )
        if torch.get_num_threads() > 1:
            found = self._outputs_of_threads(1)
        else:  # in a thread, whose pool ends with it: in a forked child the pool's threads would be missing
            with ThreadPoolExecutor(1) as pool:
                found = pool.submit(self._outputs_of_threads, 2).result()
        noise = max(self._errors(found, expected, TUNING))
        if not self.request.tolerance > LEAST_OVER_NOISE * noise:
            raise OptionError(
                f"tolerance {self.request.tolerance:g} is within the noise of fp32, whose error against "
                f"itself with another number of threads is {noise:.3g}; give at least "
                f"{LEAST_OVER_NOISE * noise:.3g}"
            )
        return noise

    def _outputs_of_threads(self, count: int) -> list[Any]:
        with _TURNS, disable_casts(), _threads(count):
            return self._outputs(TUNING)

    def _outputs(self, inputs: str) -> list[Any]:
        offset = _OTHER_SEED if inputs == FRESH else 0
        found = []
        with unchanged(self.request.model), uncompiled(), torch.no_grad():
            for index, batch in enumerate(self.request.inputs[inputs]):
                seed_all(self.request.seed + offset + index)
                found.append(arguments.has_run("model", batch.run(self.request.model)))
        return found

    def _converted(self, policy: Policy) -> contextlib.AbstractContextManager[object]:
        return session.restore(policy, self.request.device_types, self.request.options, False)

    def _errors(self, found: list[Any], expected: list[Any], inputs: str) -> list[float]:
        """Returns the error of each batch; infinite if not finite."""
        batches = self.request.inputs[inputs]
        with torch.no_grad(), disable_casts():
            errors = [
                self._error(low, high, batch.given)
                for low, high, batch in zip(found, expected, batches, strict=True)
            ]
        return [error if math.isfinite(error) else math.inf for error in errors]

    def _error(self, low: Any, high: Any, given: Any) -> float:
        metric = self.request.metric
        if metric == "relative_l2":
            return metrics.relative_l2(low, high)
        if metric == "kl":
            return metrics.kl(low, high)
        if callable(metric):
            return metrics.number("metric", metric, widened(low), widened(high))
        return metrics.relative_change(self._loss(low, given), self._loss(high, given))

    def _loss(self, output: Any, given: Any) -> float:
        loss_fn = self.request.loss_fn
        if loss_fn is None:
            return float(metrics.loss_of(None, output, given))
        return metrics.number("loss_fn", metrics.loss_of, loss_fn, widened(output), given)

    def _measured(self, policy: Policy, inputs: str, tolerance: float) -> float:
        """Returns the upper bound of a noisy measure's mean error, from paired samples."""
        offset = _OTHER_SEED if inputs == FRESH else 0

        def difference(index: int) -> float:
            seed = self.request.seed + offset + index
            if seed not in self._references:
                with disable_casts():
                    self._references[seed] = self._value(seed)
            if not math.isfinite(self._references[seed]):
                raise OptionError(f"measure is not finite in fp32, with seed {seed}")
            with self._converted(policy):
                return self._value(seed) - float(self._references[seed])

        return metrics.sampled(difference, tolerance, self.request.samples)

    def _value(self, seed: int) -> float:
        measure = self.request.measure
        assert measure is not None
        with unchanged(self.request.model), uncompiled():
            model = copy.deepcopy(self.request.model)
            seed_all(seed)
            return metrics.number("measure", measure, model, seed)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """Sets torch's number of threads inside the block."""
    before = torch.get_num_threads()
    if before != count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if before != count:
            torch.set_num_threads(before)


class _Observed:
    """An observer that counts calls: all, those in low precision, and those with low inputs alone."""

    def __init__(self) -> None:
        self._counts: dict[Spot, list[int]] = {}

    def __call__(self, call: OpCall) -> None:
        """Counts one call."""
        if not call.input_dtypes:
            return
        counts = self._counts.setdefault((call.op, call.module), [0, 0, 0])
        given = call.input_dtypes[:1] if reads_first(call.op) else call.input_dtypes
        dtype = call.dtype
        if dtype is None:  # it was left alone: it computes in its inputs' dtype
            dtype = functools.reduce(torch.promote_types, call.cast_dtypes)
        counts[0] += 1
        counts[1] += dtype in LOW_DTYPES
        counts[2] += all(each in LOW_DTYPES for each in given)

    def seen(self, candidate: Candidate, costs: Costs) -> Seen:
        """Returns a candidate's shares. All calls of a spot count as equally costly."""

        def share(cost: int, counted: int) -> float:
            part = whole = 0.0
            for spot in sorted(candidate.spots):
                counts = self._counts.get(spot, [0, 0, 0])
                whole += costs[spot][cost]
                part += costs[spot][cost] * counts[counted] / (counts[0] or 1)
            return part / whole if whole else 1.0

        return Seen(share(0, 1), share(1, 1), share(1, 2))


# --- executors ---------------------------------------------------------------------------------------

#: In a worker: token -> task. A worker serves one search at a time.
_TASKS: Final[dict[str, Task]] = {}

#: Most evaluations under way at once.
MOST_AT_ONCE: Final = 8


def evaluate(token: str, payload: bytes | None, work: Work) -> Outcome | None:
    """Returns an outcome, in a worker; None if the worker does not have the task yet, nor gets it here."""
    task = _TASKS.get(token)
    if task is None:
        if payload is None:
            return None
        task = pickle.loads(payload)
        _TASKS.clear()
        _TASKS[token] = task
    return task.outcome(*work)


class Workers:
    """Evaluates by an executor, and evaluates likely next sets ahead."""

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
        """Returns the outcome of ``work`` and finished ones of ``ahead``, which it evaluates meanwhile."""
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
        """Cancels outstanding evaluations."""
        for future in self._under_way.values():
            future.cancel()
        self._under_way.clear()
