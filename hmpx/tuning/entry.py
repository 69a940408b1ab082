"""`tune`: finds the smallest set of ops to keep in fp32, and proves that each is needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from .. import arguments
from ..errors import OptionError
from ..policy import LowType, load_policy, set_names
from ..session import restoring_conversion
from ..torch_state import unchanged
from .candidates import (
    FP32,
    Candidate,
    Costs,
    Kept,
    Outcome,
    Score,
    Scores,
    by_module,
    by_op,
    may_follow,
    timed,
)
from .evaluating import Task
from .profiling import scores_of, seconds_of, spots_of
from .request import FRESH, Request
from .result import Tuned
from .runner import Find, Journal, Searching, progress_of
from .search import Evaluate, Prices, Search, choose, choose_within, sets_of, squared_errors


@restoring_conversion()
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
    progress: bool = True,
) -> Tuned:
    """Finds the smallest set of ops to keep in fp32 for a model to keep its accuracy.

    All other ops that may run in low precision do so. One forward and backward ranks the ops by their
    effect on the result. Then the set is proven: with it the error is within the tolerance, and without
    any of its members it is not.

    The model, its inputs, the RNG state and the conversion in force are restored afterwards.

    Args:
        model: The model: a module, or a function that calls some.
        inputs: A batch, or a list of batches, also with ``measure``: they show which ops the model calls. A tuple holds positional arguments, a mapping named ones;
            anything else is a single argument. With several batches, the error is a limit for 95 % of
            further batches of their kind. The last quarter only checks the set at the end.
        loss_fn: The loss: ``loss_fn(output)``, or ``loss_fn(output, batch)``. Effects are then those on
            the loss, and ``metric="loss"`` compares it.
        metric: The error of a batch: ``"relative_l2"`` of the outputs (the default); ``"loss"`` for its
            relative change; ``"kl"`` for the divergence of softmaxed logits, in nats; or a function
            ``metric(output, fp32_output)`` that returns a number, 0 for no error. All are computed in
            fp32 or wider.
        tolerance: The largest error allowed.
        by: ``"op"`` decides for each op by name; ``"module"`` for each op in each module that matters.
        objective: ``"work"`` puts as many FLOPs and bytes as possible in low precision. ``"time"`` saves the
            most op time, as measured here with ``legalize``; ops that are no faster in low precision,
            as on hardware without bfloat16, stay in fp32.
        fresh_inputs: Batches on which the set must pass at the end.
        measure: Replaces the metric: ``measure(model, seed)`` gets a copy of the model and returns a number
            that should be small, such as the loss after a short training. The error is the mean increase
            over fp32 with the same seed.
        samples: Most seeds per set for ``measure``: 1, 2, 4, ... until it is clear whether the set passes.
            An undecided set fails.
        candidates: Types to choose among for each op, such as ``["float8_e4m3fn", "bfloat16", "float32"]``;
            the cheapest replaces ``low_precision_type``. None: ``low_precision_type`` and float32.
        limit: With ``candidates``: finds the choice with the least error within this cost, instead of the
            cheapest choice within the tolerance. ``("bits", 9.5)``: average bits, weighted by bytes;
            ``("bytes", 0.3)``: share of fp32's bytes; ``("flops", 0.1)``: share not in the cheapest type.
        low_precision_type: As for `hmpx.convert`; None: that of the conversion in force, else bfloat16.
        device_types: Types of the devices whose tensors are cast; None: those of the conversion in force,
            else of the model and the inputs.
        legalize: As for `hmpx.convert`; None: that of the conversion in force, else ``"always"`` on a CPU,
            where its results are the same in every process.
        seed: Seed of random numbers in the model.
        budget: Most evaluations. Once spent, the best set so far is returned.
        journal: A file of results, from which an interrupted search continues.
        progress: Whether to print a line to stderr every ten seconds. All are logged at level INFO.

    Returns:
        The set and the evidence; after Ctrl-C the best set so far.

    Raises:
        OptionError: An argument has an invalid value, fp32 does not pass, the tolerance is within the
            noise of fp32, or the model calls no op that may be in low precision.

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
    given = dict(locals())
    is_shown = arguments.truth("progress", given.pop("progress"))
    request = Request(**given)
    with unchanged(model, inputs, fresh_inputs, loss_fn) as request.state:
        task = Task(request)
        noise = task.noise()
        results = Journal(request.journal, request.header() if request.journal else {})
        spots: Costs = results.by_spot("spots", lambda: spots_of(request), int, int)
        scores = _scores(request, spots, request.low_type, results)
        found = (by_module if request.by == "module" else by_op)(spots, scores)
        if request.may_follow:
            found = [replace(each, may_follow=may_follow(each.op)) for each in found]
        find = _find(request, spots, scores, found, results)
        if request.objective == "time":
            seconds = results.by_spot("seconds", lambda: seconds_of(request, spots), float, float)
            found = timed(found, seconds)
        task.candidates, task.spots = tuple(found), spots
        return Searching(
            task.outcome,
            found,
            request.tolerance,
            results,
            request.budget,
            progress_of(is_shown=is_shown),
            find,
            has_fresh=FRESH in request.inputs and request.limit is None,
            is_noisy=request.measure is not None,
            noise=noise,
            about={
                "metric": request.metric_name,
                "low_precision_type": request.low_type,
                "conversion": request.conversion,
                "limit": "" if request.limit is None else "{} at most {:g}".format(*request.limit),
            },
        ).run()


def _scores(request: Request, spots: Costs, low_type: str, results: Journal) -> Scores | None:
    found = results.by_spot(
        ["scores", low_type], lambda: scores_of(request, spots, low_type), float, bool, bool
    )
    return None if found is None else {spot: Score(*each) for spot, each in found.items()}


def _find(
    request: Request,
    spots: Costs,
    scores: Scores | None,
    found: Sequence[Candidate],
    results: Journal,
) -> Find:
    if request.objective == "time":
        return find_in_time
    if not request.types:
        shipped: tuple[Kept, ...] = ()
        if request.may_follow:
            low_type = request.low_type
            policies = [load_policy(lists=s, low_precision_type=low_type) for s in set_names()]
            shipped = sets_of(policies, found)
        return lambda names, most, evaluate: Search(names, most, evaluate, shipped).run()
    errors = {}
    for name in request.types:
        if name == FP32:
            scores = {}
        elif name != request.low_type:
            scores = _scores(request, spots, name, results)
        if scores is None:
            raise OptionError(
                "to choose among several types effects are needed, but what the model returns has no "
                "gradients; tune one low_precision_type instead"
            )
        errors[name] = squared_errors(found, scores)
    if request.limit is None:
        prices = Prices(found, request.types, errors)
        return lambda _, tolerance, evaluate: choose(prices, tolerance, evaluate)
    unit, most = request.limit
    prices = Prices(found, request.types, errors, unit)
    return lambda _, tolerance, evaluate: choose_within(prices, most, evaluate)


def find_in_time(candidates: Sequence[Candidate], tolerance: float, evaluate: Evaluate) -> Kept:
    """Returns a set within the tolerance that takes little time.

    Ops that are no faster in low precision stay in fp32; no other single member can be removed.
    """
    free = frozenset(each.name for each in candidates if each.is_free)

    def with_free(kept: Kept, phase: str) -> Outcome:
        return evaluate(free | kept, phase if kept else "free")

    evaluate(frozenset(), "all low")
    others = [each for each in candidates if not each.is_free]
    return free | Search(others, tolerance, with_free).run()
