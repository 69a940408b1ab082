"""`tune`: finds the smallest set of ops to keep in fp32, and shows that it is needed."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import Any

from .. import arguments
from ..errors import OptionError, short, shown
from ..observers import LOGGER
from ..policy import LowType
from ..reports import clean
from . import metrics, profiling
from .asking import Outcome, Search, by_errors
from .assignment import may_follow
from .batches import FRESH, TUNING
from .candidates import Candidate, by_module, by_op, split, timed
from .choosing import Prices, bits_of, choose_within, search_types
from .evaluating import Task
from .journal import Journal
from .profiling import spots_of
from .request import Request, checked
from .result import Tuned
from .runner import Evaluator, Runner, Workers
from .runner import progress as shown_progress
from .search import search, search_in_time
from .searching import LEAST_OVER_NOISE, Found, Searching
from .shipped import sets_of


def tune(
    model: Callable[..., Any],
    inputs: Any,
    loss_fn: Callable[..., Any] | None = None,
    metric: str | Callable[..., Any] | None = None,
    tolerance: float = 1e-2,
    *,
    by: str = "op",
    objective: str = "work",
    fresh_inputs: Any = None,
    measure: Callable[..., Any] | None = None,
    samples: int = 1,
    candidates: Iterable[Any] | None = None,
    limit: tuple[str, float] | None = None,
    low_precision_type: LowType | str | None = None,
    device_types: Iterable[str] | None = None,
    legalize: str | None = None,
    seed: int = 0,
    budget: int = 200,
    journal: str | os.PathLike[str] | None = None,
    executor: Executor | None = None,
    progress: bool = True,
) -> Tuned:
    """Returns the smallest set of ops to keep in fp32 with which a model keeps its accuracy.

    All ops that the model calls and that may run in low precision do so, but for those in the set.
    These are found by their effect on the result, from one forward and backward, and proven: with the
    set the error is within the tolerance, and without any member of it the error is not.

    The model, its gradients and buffers, random numbers and the conversion in force are afterwards as
    before; its parameters are never written to.

    Args:
        model: The model: a module, or a function that calls some.
        inputs: A batch, or a list of batches. A tuple holds positional arguments, a mapping those by
            name, anything else is the only argument. The more of them, the less is the set fitted to one;
            of several, the last quarter is only used to check the set at the end.
        loss_fn: Loss of what the model returns: ``loss_fn(output)``, or ``loss_fn(output, batch)``.
            Effects are those on the loss, and ``metric="loss"`` compares it.
        metric: The error: ``"relative_l2"`` of the outputs (the default), ``"loss"`` for its relative
            change, ``"kl"`` for the divergence of softmaxed logits, in nats, or a function
            ``metric(output, fp32_output)`` of one batch that returns a number, 0 for no error. All are
            computed in fp32 or wider.
        tolerance: The largest error that passes.
        by: ``"op"`` decides for each op by name; ``"module"`` for each op in each module that matters.
        objective: What is to be in low precision: ``"work"``, as many FLOPs and bytes as possible, or
            ``"time"``, what saves most of the time that ops take, as measured here with ``legalize`` as it
            is given. What is no faster in low precision, as on hardware without bfloat16, stays in fp32.
        fresh_inputs: Batches that the set must pass on at the end.
        measure: Instead of a metric: ``measure(model, seed)`` returns a number that should be small, such
            as the loss after a short training. It gets a copy of the model. The error is the mean of what it is
            larger by than in fp32 with the same seed.
        samples: Most seeds that ``measure`` is called with for one set: 1, 2, 4, ... until it is clear
            whether the set passes. What stays undecided fails.
        candidates: Types to choose among for each op, such as ``["float8_e4m3fn", "bfloat16", "float32"]``;
            ``low_precision_type`` is then the cheapest of them. None for that and float32.
        limit: With ``candidates``: instead of the cheapest choice within the tolerance, the one with the
            least error that costs at most so much: ``("bits", 9.5)`` on average, weighted by bytes;
            ``("bytes", 0.3)`` of those in fp32; ``("flops", 0.1)`` of all not in the cheapest type.
        low_precision_type: As for `hmpx.convert`; None for that of the conversion in force, else bfloat16.
        device_types: Types of the devices whose tensors are cast; None for those of the conversion in
            force, else of the model and the inputs.
        legalize: As for `hmpx.convert`; None for the conversion's, else ``"always"`` on a CPU, since its
            results are the same in every process.
        seed: Seed of random numbers in the model.
        budget: Most evaluations. When they are spent, the best set so far is returned.
        journal: A file that keeps results. With it a search goes on where it was ended, by a kill say.
        executor: Runs evaluations in other processes: any executor of `concurrent.futures`' kind. It
            changes how long the search takes, and nothing that it finds.
        progress: Whether the state is shown on a terminal, where `rich` is installed. It is logged
            anyway, at level INFO.

    Returns:
        The set and the evidence; after Ctrl-C the best set so far.

    Raises:
        OptionError: An argument has an invalid value, fp32 does not pass, the tolerance is within the
            noise of fp32, or the model calls no op that might be in low precision.

    Example:
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.linear = torch.nn.Linear(16, 16)
        ...     def forward(self, x):
        ...         return (self.linear(x) + 256) - 256
        >>> _ = torch.manual_seed(0)
        >>> best = hmpx.tune(Model(), torch.randn(8, 16), device_types={"cpu"}, progress=False)
        >>> sorted(best.keep_fp32), best.low_precision_flops_share
        (['add', 'sub'], 1.0)
    """
    request = checked(
        model,
        inputs,
        fresh_inputs=fresh_inputs,
        loss_fn=loss_fn,
        metric=metric,
        measure=measure,
        samples=samples,
        tolerance=tolerance,
        by=by,
        low_precision_type=low_precision_type,
        device_types=device_types,
        legalize=legalize,
        seed=seed,
        budget=budget,
        journal=journal,
        types=candidates,
        limit=limit,
        objective=objective,
    )
    is_shown = arguments.truth("progress", progress)
    if executor is not None and not hasattr(executor, "submit"):
        raise OptionError(
            f"executor must have submit(), as those of concurrent.futures, not {shown(executor)}"
        )
    return _Tuning(request, executor).run(is_shown=is_shown)


class _Tuning:
    """One search in this process or by an executor."""

    def __init__(self, request: Request, executor: Executor | None) -> None:
        self._request, self._executor = request, executor
        self._task = Task(request)

    def run(self, *, is_shown: bool) -> Tuned:
        """Returns the result."""
        request, task = self._request, self._task
        noise = self._noise_floor()
        journal = Journal(request.journal, request.header(), profiling.RECORDS)
        spots, scores = self._profile(journal)
        is_finer = request.by == "module" and scores is None
        if request.by == "op" or is_finer:
            found = by_op(spots, scores, names_modules=is_finer)
        else:
            found = by_module(spots, scores)
        if request.may_follow and not is_finer:
            found = [
                dataclasses.replace(each, may_follow=may_follow(min(each.spots)[0]))
                for each in found
            ]
        make = self._search(journal, spots, found)
        if request.objective == "time":
            found = timed(found, profiling.seconds_of_spots(request, spots, journal))
        finest = split(found, spots) if is_finer else []
        names = {each.name for each in found}
        task.candidates = (*found, *(each for each in finest if each.name not in names))
        task.spots = spots
        workers = None if self._executor is None else Workers(self._executor, task)
        try:
            with shown_progress(is_shown=is_shown) as show:
                runner = Runner(
                    workers or _Here(task),
                    journal,
                    request.budget,
                    lambda number, each: show(number, each, len(found)),
                    is_noisy=request.measure is not None,
                )
                searching = Searching(
                    runner,
                    found,
                    spots,
                    request.tolerance,
                    is_finer=is_finer,
                    has_fresh=FRESH in request.inputs and request.limit is None,
                    noise=noise,
                    make=make,
                )
                return result(
                    searching,
                    searching.run(),
                    _metric_name(request),
                    request.low_type,
                    _limit_text(request.limit),
                )
        finally:
            if workers is not None:
                workers.close()

    def _search(
        self, journal: Journal, spots: profiling.Costs, found: Sequence[Candidate]
    ) -> Callable[[Sequence[Candidate], float], Search]:
        """Returns what makes the search."""
        request = self._request
        if request.objective == "time":
            return search_in_time
        if not request.types:
            shipped = sets_of(request.shipped(), found) if request.may_follow else ()
            return lambda candidates, tolerance: search(candidates, tolerance, shipped)
        errors = profiling.errors_of(request, spots, found, journal)
        unit, most = request.limit or ("bytes", math.inf)
        prices = Prices(request.types, bits_of(request.types), errors, unit)
        if request.limit is None:
            return lambda candidates, tolerance: by_errors(
                search_types(candidates, prices, tolerance)
            )
        return lambda candidates, tolerance: by_errors(choose_within(candidates, prices, most))

    def _noise_floor(self) -> float:
        """Returns the error of fp32 against itself.

        Raises:
            OptionError: The tolerance is too close to it.
        """
        noise = self._task.noise()
        if self._request.metric == "relative_l2" and self._request.measure is None:
            unseen = clean(", ".join(metrics.unseen_of(self._task.reference(TUNING)[0])))
            if unseen:
                LOGGER.warning(
                    "tune: relative_l2 does not look at %s of what the model returns; a function as metric= can",
                    short(unseen),
                )
        if not self._request.tolerance > LEAST_OVER_NOISE * noise:
            raise OptionError(
                f"tolerance {self._request.tolerance:g} is within the noise of fp32, whose error against "
                f"itself with another number of threads is {noise:.3g}; give at least "
                f"{LEAST_OVER_NOISE * noise:.3g}"
            )
        return noise

    def _profile(self, journal: Journal) -> tuple[profiling.Costs, profiling.Scores | None]:
        """Returns what may run in low precision with its cost, and its effects if they are known."""
        request = self._request
        for known in journal.parsed("spots", profiling.from_record):
            return known
        batches = request.inputs[TUNING]
        spots = spots_of(
            request.model, batches, request.device_types, request.options, request.seed
        )
        if not spots:
            raise OptionError(
                "the model calls no op on fp32 tensors that may run in low precision; are its inputs and "
                f"parameters fp32, and on {' or '.join(sorted(request.device_types))}?"
            )
        scores = profiling.scores_of(request, spots, request.low_type)
        journal.write(profiling.to_record(spots, scores))
        return spots, scores


def _metric_name(request: Request) -> str:
    if request.measure is not None:
        return getattr(request.measure, "__name__", "measure")
    if isinstance(request.metric, str):
        return request.metric
    return getattr(request.metric, "__name__", "metric")


def _limit_text(limit: tuple[str, float] | None) -> str:
    return "" if limit is None else f"{limit[0]} at most {limit[1]:g}"


def result(
    searching: Searching, found: Found, metric: str, low_type: str, limit: str = ""
) -> Tuned:
    """Returns the result of a search."""
    runner = searching.runner
    outcome = runner.known(found.kept, searching.tolerance)
    low = [each.error for each in runner.path if not each.kept]
    return Tuned(
        kept=found.kept,
        error=math.nan if outcome is None else outcome.error,
        all_low_error=low[0] if low else math.nan,
        fresh_error=found.fresh_error,
        tolerance=searching.tolerance,
        noise=searching.noise,
        metric=metric,
        low_precision_type=low_type,
        evaluations=runner.evaluations,
        is_complete=not found.stopped_by,
        stopped_by=found.stopped_by,
        path=tuple(runner.path),
        candidates=found.candidates,
        limit=limit,
        searched=found.searched,
        seen={} if outcome is None else outcome.seen,
    )


@dataclasses.dataclass(frozen=True)
class _Here(Evaluator):
    """Evaluates in this process, and nothing ahead."""

    task: Task

    def outcome(self, work: Any, ahead: Any, note: Any, /) -> Outcome:
        """Returns the outcome."""
        return self.task.outcome(*work)
