"""A task of `tune`: its arguments, checked as a whole; the model's ops, and the errors of sets."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any, Final

import torch

from .. import arguments, session, tensors
from ..casting import Options
from ..comparing import compare
from ..errors import OptionError, raised_here, short, shown
from ..forks import in_own_thread
from ..inputs import Steps, batches_of
from ..observers import LOGGER, OpCall, attach
from ..policy import LEGALIZE_MODES, CastPolicy, LowType, Policy
from ..recording import record
from ..renames import renamed
from ..reports import clean
from ..session import restoring
from ..torch_internals import uncompiled
from ..torch_state import ModelState, disable_casts, seed_all, unchanged, without_casts
from ..version import __version__
from . import metrics
from .candidates import (
    Candidate,
    Costs,
    Kept,
    LowShares,
    Outcome,
    Score,
    Scores,
    Spot,
    assigned,
    called_spots,
    candidates_of,
    observing_policy,
    policy_of,
    relative,
)
from .result import Tuned
from .search import FRESH, LEAST_OVER_NOISE, TUNING, Evaluator, Journal, Search, shipped_sets

#: Added to the seed for fresh inputs.
_OTHER_SEED: Final = 1_000


class Task(Evaluator):
    """What `tune` is asked for: a model with its inputs and settings.

    ``batches`` maps `TUNING`, and `FRESH` if there are any, to lists; ``state`` restores the model. Sets are
    evaluated once ``candidates`` and the ``costs`` of their spots are known.
    """

    state: ModelState
    costs: Costs
    conversion: dict[str, Any]

    def __init__(self, **given: Any) -> None:
        self.model, self.metric = given["model"], given["metric"]
        self.measure = given["measure"]
        self.steps = Steps("tune", self.model, given["forward_step"], given["loss_fn"])
        session.refuse_where_off("tune")
        if not callable(self.measure) and self.measure is not None:
            raise OptionError(f"measure must be a function, not {shown(self.measure)}")
        if not callable(self.metric):
            metric = "relative_l2" if self.metric is None else self.metric
            self.metric = arguments.choice("metric", metric, metrics.METRICS)
        found = batches_of("batches", given["batches"])
        self.batches = {TUNING: found}
        if given["fresh_batches"] is not None:
            self.batches[FRESH] = batches_of("fresh_batches", given["fresh_batches"])
        elif end := len(found) - max(1, len(found) // 4):  # the last quarter of several
            self.batches = {TUNING: found[:end], FRESH: found[end:]}
        self.has_fresh, self.is_noisy = FRESH in self.batches, self.measure is not None
        self.batch_count = 0 if self.is_noisy else len(self.batches[TUNING])
        self._choose_conversion(given["device_types"], given["legalize"])
        self.samples = arguments.whole("samples", given["samples"], 1)
        self.tolerance = _tolerance(given["tolerance"])
        self.by = arguments.choice("by", given["by"], ("op", "module"))
        self.low_type = low_type_name(given["low_precision_type"])
        self.seed = arguments.whole("seed", given["seed"], 0)
        self.budget = arguments.whole("budget", given["budget"], 2)
        self.journal = arguments.path("journal", given["journal"])
        self._references: dict[Any, Any] = {}
        self.metric_name = self.metric
        if self.is_noisy:
            self.metric_name = getattr(self.measure, "__name__", "measure")
        elif callable(self.metric):
            self.metric_name = getattr(self.metric, "__name__", "metric")
        low_dtype = Policy.from_ops(low_precision_type=self.low_type).low_precision_type
        is_native = isinstance(low_dtype, torch.dtype)  # rather than a number format
        # Ops may also follow their inputs if one evaluation shows these inputs' dtypes.
        self.may_follow = is_native and not self.is_noisy
        self.conversion = {"device_types": set(self.device_types)}
        for each in fields(Options):
            value = getattr(self.options, each.name)
            if value != each.default and not (each.metadata["is_of_formats"] and is_native):
                self.conversion[each.name] = value  # besides the policy, unless by default

    def _choose_conversion(self, device_types: Iterable[str] | None, legalize: Any) -> None:
        """Sets the conversion of evaluations: that of the conversion in force, unless overridden."""
        current = session.current()
        self.options = Options() if current is None else replace(current.options, within=None)
        if device_types is not None:
            self.device_types = tensors.parse_device_types(device_types)
        elif current is not None:
            self.device_types = current.device_types
        else:
            held = [*_held(self.model), *tensors.tensors_of(self.batches[TUNING])]
            types = frozenset(each.device.type for each in held)
            self.device_types = types or tensors.parse_device_types(None)
        if legalize is None and current is None and self.device_types == {"cpu"}:
            legalize = "always"  # "auto" depends on timings that differ between processes
        if legalize is not None:
            legalize = arguments.choice("legalize", legalize, LEGALIZE_MODES)
            self.options = replace(self.options, legalize=legalize)

    def header(self) -> dict[str, Any]:
        """Returns the identity of this search for its journal. The tolerance may differ."""
        return {
            "hmpx": __version__,
            "torch": torch.__version__,
            "model": _fingerprint([*_held(self.model), *_held(self.model, "buffers")]),
            "inputs": {
                name: _fingerprint(tensors.tensors_of(x)) for name, x in self.batches.items()
            },
            "metric": _name(self.metric),
            "loss_fn": _name(self.steps.loss_fn),
            "measure": _name(self.measure),
            "samples": self.samples,
            "by": self.by,
            "low_precision_type": self.low_type,
            "device_types": sorted(self.device_types),
            # As in journals from before these options.
            "options": str(self.options).replace(", hardware='auto', within=None", ""),
            "seed": self.seed,
            "threads": torch.get_num_threads(),
            **({"forward_step": _name(step)} if (step := self.steps.forward_step) else {}),
        }

    # --- its ops

    def spots(self) -> Costs:
        """Maps each op and module that may run in low precision to FLOPs and bytes of its calls."""
        self.state.restore()
        with (
            torch.no_grad(),
            record() as recording,  # first: wrappers are made once and include it
            self._converted(observing_policy()),
        ):
            for index, batch in enumerate(self.batches[TUNING]):
                seed_all(self.seed + index)
                self.steps.forward(batch)
        found = called_spots(recording.rows)
        if not found:
            raise OptionError(
                "the model calls no op on fp32 tensors that may run in low precision; are its inputs and "
                f"parameters fp32, and on {' or '.join(sorted(self.device_types))}?"
            )
        return found

    def scores(self) -> Scores | None:
        """Returns the effect of each spot in low precision, and whether its values leave that type's range.

        None if no effect is known because the model's output has no gradients.
        """
        policy = policy_of(dict.fromkeys(self.costs, self.low_type), self.low_type)
        loss_fn = self.steps.loss_fn or (metrics.loss_of if self.metric == "loss" else None)
        found: dict[Spot, Score] = {}
        for index, batch in enumerate(self.batches[TUNING][:4]):
            self.state.restore()
            seed_all(self.seed + index)
            comparison = compare(
                self.model,
                batch,
                forward_step=self.steps.forward_step,
                loss_fn=loss_fn,
                policy=policy,
                device_types=self.device_types,
                legalize=self.options.legalize,
                seed=self.seed,
            )
            for row in comparison.rows:
                if (spot := (row.op, row.module)) in self.costs:
                    known = found.get(spot, Score())
                    is_blind = row.unseen > 0 or (math.isnan(row.effect) and row.error != 0)
                    found[spot] = Score(
                        math.hypot(known.effect, row.effect if math.isfinite(row.effect) else 0.0),
                        known.is_hard or not row.fits or math.isinf(row.effect),
                        known.is_unseen or is_blind,
                    )
        return found if any(each.effect for each in found.values()) else None

    # --- errors of sets

    def outcome(self, kept: Kept, inputs: str, tolerance: float) -> Outcome:
        """Returns the error with ``kept`` in fp32 (infinite if not finite), and the shares in low precision.

        Noisy measures are sampled until it is clear whether they are within ``tolerance``.
        """
        policy = policy_of(assigned(self.candidates, kept, self.low_type), self.low_type)
        if self.measure is not None:
            return Outcome(self._measured(policy, inputs, tolerance))
        self.reference(inputs)  # before anything is converted
        watched = [each for each in self.candidates if each.may_follow]
        observed = _Observed()
        # The observer first, since wrappers are made once and include it.
        with (
            attach(observed, every_op=True) if watched else contextlib.nullcontext(),
            self._converted(policy),
        ):
            try:
                found = self._outputs(inputs)
            except raised_here(RuntimeError, ValueError, ArithmeticError) as error:
                if isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error):
                    raise
                return Outcome(math.inf)  # the model branches on values that are off
        errors = self._errors(found, inputs)
        return Outcome(
            metrics.limit(errors) if inputs == TUNING else max(errors),
            {each.name: observed.seen(each, self.costs) for each in watched},
        )

    def reference(self, inputs: str) -> list[Any]:
        """Returns the model's fp32 output for each batch."""
        if inputs not in self._references:
            with disable_casts():
                found = self._outputs(inputs)
            values = [each.value for each in tensors.parts_of(found)]
            if all(each is None or isinstance(each, tensors.Opaque) for each in values):
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

    def measure_noise(self) -> None:
        """Sets ``noise``: fp32's error against itself with another number of threads; the tolerance must be larger."""
        if self.is_noisy:
            return
        expected, *_ = self.reference(TUNING)
        if self.metric == "relative_l2" and (unseen := metrics.unseen_of(expected)):
            LOGGER.warning(
                "tune: relative_l2 does not look at %s of what the model returns; a function as metric= can",
                short(clean(", ".join(unseen))),
            )
        if torch.get_num_threads() > 1:
            found = self._outputs_of_threads(1)
        else:  # in a thread, whose OpenMP pool ends with it: a forked child would lack the pool's threads
            found = in_own_thread(functools.partial(self._outputs_of_threads, 2), "hmpx-tune")
        self.noise = max(self._errors(found, TUNING))
        if not self.tolerance > LEAST_OVER_NOISE * self.noise:
            raise OptionError(
                f"tolerance {self.tolerance:g} is within the noise of fp32, whose error against "
                f"itself with another number of threads is {self.noise:.3g}; give at least "
                f"{LEAST_OVER_NOISE * self.noise:.3g}"
            )

    def _outputs_of_threads(self, count: int) -> list[Any]:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            with disable_casts():
                return self._outputs(TUNING)
        finally:
            torch.set_num_threads(before)

    def _outputs(self, inputs: str) -> list[Any]:
        seed = self.seed + (_OTHER_SEED if inputs == FRESH else 0)
        found = []
        self.state.restore()
        with uncompiled(), torch.no_grad():
            for index, batch in enumerate(self.batches[inputs]):
                seed_all(seed + index)
                output = self.steps.forward(batch)
                with without_casts():
                    found.append(tensors.copied(output))  # it may be an attribute, restored later
        return found

    def _converted(self, policy: Policy) -> contextlib.AbstractContextManager[object]:
        return session.restore(policy, self.device_types, self.options, False)

    def _errors(self, found: list[Any], inputs: str) -> list[float]:
        expected, batches = self.reference(inputs), self.batches[inputs]
        with torch.no_grad(), disable_casts():
            errors = [self._error(*each) for each in zip(found, expected, batches, strict=True)]
        return [error if math.isfinite(error) else math.inf for error in errors]

    def _error(self, low: Any, high: Any, batch: Any) -> float:
        metric, steps = self.metric, self.steps
        if metric == "relative_l2":
            return metrics.relative_l2(low, high)
        if metric == "kl":
            return metrics.kl(low, high)
        if callable(metric):
            return metrics.number("metric", metric, tensors.widened(low), tensors.widened(high))
        if steps.loss_fn is None:
            found, expected = float(metrics.loss_of(low)), float(metrics.loss_of(high))
        else:
            found, expected = [
                metrics.number("loss_fn", steps.loss, tensors.widened(each), batch)
                for each in (low, high)
            ]
        return metrics.ratio(abs(found - expected), abs(expected))

    def _measured(self, policy: Policy, inputs: str, tolerance: float) -> float:
        """Returns the upper bound of a noisy measure's mean error, from paired samples."""
        first = self.seed + (_OTHER_SEED if inputs == FRESH else 0)

        def difference(index: int) -> float:
            seed = first + index
            if seed not in self._references:
                with disable_casts():
                    self._references[seed] = self._value(seed)
            if not math.isfinite(self._references[seed]):
                raise OptionError(f"measure is not finite in fp32, with seed {seed}")
            with self._converted(policy):
                return self._value(seed) - float(self._references[seed])

        return metrics.sampled(difference, tolerance, self.samples)

    def _value(self, seed: int) -> float:
        self.state.restore()
        with uncompiled():
            model = copy.deepcopy(self.model)
            seed_all(seed)
            return metrics.number("measure", self.measure, model, seed)


class _Observed:
    """An observer that counts calls: all, those in low precision, and those with low inputs alone."""

    def __init__(self) -> None:
        self._counts: dict[Spot, list[int]] = {}

    def __call__(self, call: OpCall) -> None:
        if not call.input_dtypes:
            return
        is_first = relative(call.op) is CastPolicy.FIRST
        given = call.input_dtypes[:1] if is_first else call.input_dtypes
        # A call that was left alone computes in its inputs' dtype.
        dtype = tensors.promoted(call.cast_dtypes) if call.dtype is None else call.dtype
        counts = self._counts.setdefault((call.op, call.module), [0, 0, 0])
        counts[0] += 1
        counts[1] += dtype in tensors.LOW_DTYPES
        counts[2] += all(each in tensors.LOW_DTYPES for each in given)

    def seen(self, candidate: Candidate, costs: Costs) -> LowShares:
        """Returns a candidate's shares. All calls of a spot count as equally costly."""

        def share(cost: int, counted: int) -> float:
            part = whole = 0.0
            for spot in sorted(candidate.spots):
                counts = self._counts.get(spot, [0, 0, 0])
                whole += costs[spot][cost]
                part += costs[spot][cost] * counts[counted] / (counts[0] or 1)
            return part / whole if whole else 1.0

        return LowShares(share(0, 1), share(1, 1), share(1, 2))


def low_type_name(low_precision_type: Any) -> str:
    """Returns the name of a low-precision type; None: that of the conversion in force, else bfloat16."""
    if low_precision_type is None:
        current = session.current()
        low_precision_type = current.policy.low_precision_type if current else torch.bfloat16
    return tensors.long_name(Policy({}, low_precision_type).low_precision_type)


def _tolerance(value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise OptionError(f"tolerance must be a number, not {shown(value)}")
    found = float(value)
    if not (found > 0 and math.isfinite(found)):
        raise OptionError(
            f"tolerance must be above 0 and finite, not {shown(value)}: the largest error that passes, "
            "such as 0.01"
        )
    return found


def _held(model: Any, which: str = "parameters") -> Iterable[torch.Tensor]:
    return getattr(model, which)() if isinstance(model, torch.nn.Module) else ()


def _fingerprint(values: Iterable[torch.Tensor]) -> str:
    """Returns a string that is equal for tensors of equal shapes and sums."""
    said = hashlib.sha256()
    for each in values:
        value = each.detach()
        is_plain = value.layout is torch.strided and not value.is_meta
        total = float(value.to(torch.complex128).abs().sum()) if is_plain else 0.0
        said.update(repr((tuple(value.shape), str(value.dtype), total)).encode())
    return said.hexdigest()[:16]


def _name(function: Any) -> str:
    """Returns the name of a function; a string as it is, ``""`` for None."""
    if function is None or isinstance(function, str):
        return function or ""
    return getattr(function, "__qualname__", None) or type(function).__qualname__


@restoring
@renamed(inputs="batches", fresh_inputs="fresh_batches")
def tune(
    model: Callable[..., Any],
    batches: Any,
    loss_fn: Callable[..., Any] | None = None,
    metric: str | Callable[..., Any] | None = None,
    tolerance: float = 1e-2,
    *,
    forward_step: Callable[[Any, Any], Any] | None = None,
    by: str = "op",
    fresh_batches: Any = None,
    measure: Callable[..., Any] | None = None,
    samples: int = 1,
    low_precision_type: LowType | str | None = None,
    device_types: Iterable[str] | None = None,
    legalize: str | None = None,
    seed: int = 0,
    budget: int = 200,
    journal: str | os.PathLike[str] | None = None,
    progress: bool | Callable[[str], object] = True,
) -> Tuned:
    """Finds the smallest set of ops to keep in fp32 for a model to keep its accuracy.

    All other ops that may run in low precision do so. One forward and backward ranks the ops by
    their effect on the result. With the set the error is within the tolerance, without any of its
    members it is not; both are measured.

    Model, inputs, RNG state and conversion are restored.

    Args:
        model: The model: a module, or a function that calls some.
        batches: An iterable of [inputs](#inputs), or of batches for ``forward_step``, also with
            ``measure``: they show which ops the model calls. A tensor, tuple or mapping is one
            batch. Of several the last quarter only checks the set. If the others are five or more,
            the error is a limit for 95 % of further batches, else the largest of theirs.
        loss_fn: As for ``compare``. Effects are then those on the loss, and ``metric="loss"``
            compares it.
        metric: The error of a batch: ``"relative_l2"`` of the outputs (the default); ``"loss"`` for
            its relative change; ``"kl"`` for the divergence of softmaxed logits, in nats; or a
            function ``metric(output, fp32_output)``, 0 for no error. All compute in fp32 or wider.
        tolerance: The largest error allowed.
        forward_step: As for ``compare``.
        by: ``"op"`` decides for each op by name; ``"module"`` for each op in each module that matters.
        fresh_batches: Batches on which the set must pass at the end.
        measure: Replaces the metric: ``measure(model, seed)`` gets a copy of the model and returns
            a number that should be small. The error is its mean increase over fp32 with the same
            seed.
        samples: Most seeds per set for ``measure``: 1, 2, 4, ... until it is clear whether the set passes.
            An undecided set fails.
        low_precision_type: As for `hmpx.convert`; None: that of the conversion in force, else bfloat16.
        device_types: As for `hmpx.convert`; None: those of the conversion in force, else of the
            model and the inputs.
        legalize: As for `hmpx.convert`; None: that of the conversion in force, else ``"always"`` on
            a CPU.
        seed: Seed of random numbers in the model.
        budget: Most evaluations. Once spent, the best set so far is returned.
        journal: A file from which an interrupted search continues.
        progress: As for ``bench``.

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
    show = arguments.progress(given.pop("progress"))
    with unchanged(None):  # data loaders draw random numbers
        task = Task(**given)
    with unchanged(model, task.batches, forward_step, loss_fn) as task.state:
        task.measure_noise()
        results = Journal(task.journal, task.header() if task.journal else {})
        task.costs = results.by_spot("spots", task.spots, int, int)
        known = results.by_spot(["scores", task.low_type], task.scores, float, bool, bool)
        scores = known and {spot: Score(*each) for spot, each in known.items()}
        task.candidates = candidates_of(task.costs, scores, task.by, follow=task.may_follow)
        if task.may_follow:
            task.shipped = shipped_sets(task.candidates, task.low_type)
        return Search(task, results, show).run()
