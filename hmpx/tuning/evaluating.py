"""Evaluates sets: runs the model with a set in fp32 and the rest in low precision."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from .. import session
from ..errors import OptionError, raised_here, short, shown
from ..forks import in_own_thread
from ..observers import LOGGER, OpCall, attach
from ..policy import CastPolicy, Policy
from ..reports import clean
from ..tensors import LOW_DTYPES, Opaque, copied, parts_of, promoted, widened
from ..torch_internals import uncompiled
from ..torch_state import disable_casts, seed_all, without_casts
from . import metrics
from .candidates import (
    Candidate,
    Costs,
    Kept,
    LowShares,
    Outcome,
    Spot,
    assigned,
    policy_of,
    relative,
)
from .request import FRESH, TUNING, Request

#: The least tolerance, as a multiple of fp32's error against itself.
LEAST_OVER_NOISE: Final = 3

#: Added to the seed for fresh inputs.
_OTHER_SEED: Final = 1_000


@dataclass
class Task:
    """Evaluates sets for a request, once its candidates are known."""

    request: Request
    candidates: tuple[Candidate, ...] = ()
    spots: Costs = field(default_factory=dict)
    _references: dict[Any, Any] = field(default_factory=dict, repr=False)

    def outcome(self, kept: Kept, inputs: str, tolerance: float) -> Outcome:
        """Returns the error with ``kept`` in fp32 (infinite if not finite), and the shares in low precision.

        Noisy measures are sampled until it is clear whether they are within ``tolerance``.
        """
        low_type = self.request.low_type
        policy = policy_of(assigned(self.candidates, kept, low_type), low_type)
        if self.request.measure is not None:
            return Outcome(self._measured(policy, inputs, tolerance))
        self.reference(inputs)
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
            {each.name: observed.seen(each, self.spots) for each in watched},
        )

    def reference(self, inputs: str) -> list[Any]:
        """Returns the model's fp32 output for each batch."""
        if inputs not in self._references:
            with disable_casts():
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
        """Returns fp32's error against itself with another number of threads; the tolerance must be larger."""
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
        else:  # in a thread, whose OpenMP pool ends with it: a forked child would lack the pool's threads
            found = in_own_thread(functools.partial(self._outputs_of_threads, 2), "hmpx-tune")
        noise = max(self._errors(found, TUNING))
        if not self.request.tolerance > LEAST_OVER_NOISE * noise:
            raise OptionError(
                f"tolerance {self.request.tolerance:g} is within the noise of fp32, whose error against "
                f"itself with another number of threads is {noise:.3g}; give at least "
                f"{LEAST_OVER_NOISE * noise:.3g}"
            )
        return noise

    def _outputs_of_threads(self, count: int) -> list[Any]:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            with disable_casts():
                return self._outputs(TUNING)
        finally:
            torch.set_num_threads(before)

    def _outputs(self, inputs: str) -> list[Any]:
        seed = self.request.seed + (_OTHER_SEED if inputs == FRESH else 0)
        found = []
        self.request.state.restore()
        with uncompiled(), torch.no_grad():
            for index, batch in enumerate(self.request.batches[inputs]):
                seed_all(seed + index)
                output = self.request.steps.forward(batch)
                with without_casts():
                    found.append(copied(output))  # it may be an attribute, which is restored
        return found

    def _converted(self, policy: Policy) -> contextlib.AbstractContextManager[object]:
        return session.restore(policy, self.request.device_types, self.request.options, False)

    def _errors(self, found: list[Any], inputs: str) -> list[float]:
        expected, batches = self.reference(inputs), self.request.batches[inputs]
        with torch.no_grad(), disable_casts():
            errors = [self._error(*each) for each in zip(found, expected, batches, strict=True)]
        return [error if math.isfinite(error) else math.inf for error in errors]

    def _error(self, low: Any, high: Any, batch: Any) -> float:
        metric, steps = self.request.metric, self.request.steps
        if metric == "relative_l2":
            return metrics.relative_l2(low, high)
        if metric == "kl":
            return metrics.kl(low, high)
        if callable(metric):
            return metrics.number("metric", metric, widened(low), widened(high))
        if steps.loss_fn is None:
            found, expected = float(metrics.loss_of(low)), float(metrics.loss_of(high))
        else:
            found, expected = [
                metrics.number("loss_fn", steps.loss, widened(each), batch) for each in (low, high)
            ]
        return metrics.ratio(abs(found - expected), abs(expected))

    def _measured(self, policy: Policy, inputs: str, tolerance: float) -> float:
        """Returns the upper bound of a noisy measure's mean error, from paired samples."""
        first = self.request.seed + (_OTHER_SEED if inputs == FRESH else 0)

        def difference(index: int) -> float:
            seed = first + index
            if seed not in self._references:
                with disable_casts():
                    self._references[seed] = self._value(seed)
            if not math.isfinite(self._references[seed]):
                raise OptionError(f"measure is not finite in fp32, with seed {seed}")
            with self._converted(policy):
                return self._value(seed) - float(self._references[seed])

        return metrics.sampled(difference, tolerance, self.request.samples)

    def _value(self, seed: int) -> float:
        assert self.request.measure is not None
        self.request.state.restore()
        with uncompiled():
            model = copy.deepcopy(self.request.model)
            seed_all(seed)
            return metrics.number("measure", self.request.measure, model, seed)


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
        dtype = promoted(call.cast_dtypes) if call.dtype is None else call.dtype
        counts = self._counts.setdefault((call.op, call.module), [0, 0, 0])
        counts[0] += 1
        counts[1] += dtype in LOW_DTYPES
        counts[2] += all(each in LOW_DTYPES for each in given)

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
