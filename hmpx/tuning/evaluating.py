"""Evaluates a set: the model runs with it in fp32 and all else in low precision; how far off is it?"""

from __future__ import annotations

import contextlib
import copy
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from .. import arguments, session
from ..casting import Options
from ..errors import OptionError, shown
from ..observers import attach
from ..tensors import Opaque, parts_of, widened
from ..torch_internals import uncompiled
from ..torch_state import disable_casts, unchanged
from . import metrics
from .assignment import assigned, policy_of
from .batches import Batch
from .candidates import Candidate, Kept, Spot
from .evaluation import Outcome
from .observing import Observed
from .sampling import Sampling, sampled
from .seeding import seed_all

#: Which inputs an evaluation is made on: those of the search, or those it has never seen.
TUNING: Final = "tuning"
FRESH: Final = "fresh"

#: Added to the seed on fresh inputs.
_OTHER_SEED: Final = 1_000

#: A conversion holds for the whole process, so threads take turns.
_TURNS: Final = threading.RLock()


@dataclass
class Task:
    """All that an evaluation needs; what is pickled to other processes.

    Attributes:
        model: The model.
        inputs: `TUNING`, and `FRESH` if there are any -> batches.
        metric: A name in `metrics.METRICS`, or the user's function of the outputs and those in fp32.
        loss_fn: The user's loss of an output; None if there is none.
        measure: The user's function of a model and a seed, which takes the metric's place; or None.
        sampling: How often that is called.
        seed: Seed of random numbers.
        low_type: Name of the low-precision type.
        candidates: What may be kept, and
        spots: the FLOPs and bytes of the spots that these stand for.
        device_types: The device types whose tensors are cast.
        options: How ops compute.
        threads: How many threads torch uses: sums depend on it.
    """

    model: Any
    inputs: Mapping[str, Sequence[Batch]]
    metric: str | Callable[..., Any]
    loss_fn: Callable[..., Any] | None
    measure: Callable[..., Any] | None
    sampling: Sampling
    seed: int
    low_type: str
    candidates: tuple[Candidate, ...]
    spots: Mapping[Spot, tuple[int, int]]
    device_types: frozenset[str]
    options: Options
    threads: int
    _references: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the results in fp32, which the other process computes itself."""
        return {**vars(self), "_references": {}}

    def outcome(self, kept: Kept, inputs: str, tolerance: float) -> Outcome:
        """Returns the error with ``kept`` in fp32, infinite where it is not finite, and what was seen.

        Args:
            kept: The set.
            inputs: `TUNING` or `FRESH`.
            tolerance: For measures with noise: what they are compared with.
        """
        policy = policy_of(assigned(self.candidates, kept, self.low_type), self.low_type)
        with _TURNS:
            threads = torch.get_num_threads()
            if threads != self.threads:
                torch.set_num_threads(self.threads)
            try:
                return self._outcome(policy, inputs, tolerance)
            finally:
                if threads != self.threads:
                    torch.set_num_threads(threads)

    def _outcome(self, policy: Any, inputs: str, tolerance: float) -> Outcome:
        if self.measure is not None:
            return Outcome(self._measured(policy, inputs, tolerance))
        expected = self.reference(inputs)
        observed = Observed()
        is_watched = any(each.may_follow for each in self.candidates)
        with (
            # before the conversion: wrappers are made once, with it
            attach(observed, every_op=True) if is_watched else contextlib.nullcontext(),
            session.restore(policy, self.device_types, self.options, False),
        ):
            try:
                found = self._outputs(inputs)
            except (RuntimeError, ValueError, ArithmeticError) as error:
                if _is_lack_of_memory(error):
                    raise
                return Outcome(math.inf)  # its values decide what the model does, and are off
        seen = observed.seen(self.candidates, self.spots)
        return Outcome(self._distance(found, expected, inputs), seen)

    def reference(self, inputs: str) -> list[Any]:
        """Returns what the model returns in fp32 for each batch.

        Raises:
            OptionError: It is not a number somewhere.
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
        """Returns the error of fp32 against itself, with another number of threads."""
        if self.measure is not None:
            return 0.0
        expected = self.reference(TUNING)
        if torch.get_num_threads() > 1:
            found = self._outputs_of_threads(1)
        else:  # in a thread, whose pool ends with it: in a forked child the pool's threads would be missing
            with ThreadPoolExecutor(1) as pool:
                found = pool.submit(self._outputs_of_threads, 2).result()
        return self._distance(found, expected, TUNING)

    def _outputs_of_threads(self, count: int) -> list[Any]:
        threads = torch.get_num_threads()
        with _TURNS, disable_casts():
            torch.set_num_threads(count)
            try:
                return self._outputs(TUNING)
            finally:
                torch.set_num_threads(threads)

    def _outputs(self, inputs: str) -> list[Any]:
        offset = _OTHER_SEED if inputs == FRESH else 0
        found = []
        with unchanged(self.model), uncompiled(), torch.no_grad():
            for index, batch in enumerate(self.inputs[inputs]):
                seed_all(self.seed + offset + index)
                found.append(arguments.has_run("model", batch.run(self.model)))
        return found

    def _distance(self, found: list[Any], expected: list[Any], inputs: str) -> float:
        with torch.no_grad(), disable_casts():
            if self.metric == "relative_l2":
                return metrics.relative_l2(found, expected)
            if self.metric == "kl":
                return metrics.kl(found, expected)
            if self.metric == "loss":
                return metrics.relative_change(
                    self._losses(found, inputs), self._losses(expected, inputs)
                )
            if not callable(self.metric):
                raise OptionError(f"unknown metric {self.metric!r}")
            return metrics.of_user(self.metric)([*map(widened, found)], [*map(widened, expected)])

    def _losses(self, outputs: list[Any], inputs: str) -> list[float]:
        return [
            metrics.number("loss_fn", metrics.loss_of, self.loss_fn, widened(output), batch)
            if self.loss_fn is not None
            else float(metrics.loss_of(None, output, batch))
            for output, batch in zip(outputs, self.inputs[inputs], strict=True)
        ]

    def _measured(self, policy: Any, inputs: str, tolerance: float) -> float:
        """Returns what a measure with noise loses: the upper end of what paired samples leave open."""
        offset = _OTHER_SEED if inputs == FRESH else 0

        def difference(index: int) -> float:
            seed = self.seed + offset + index
            if seed not in self._references:
                with disable_casts():
                    self._references[seed] = self._value(seed)
            if not math.isfinite(self._references[seed]):
                raise OptionError(f"measure is not finite in fp32, with seed {seed}")
            with session.restore(policy, self.device_types, self.options, False):
                return self._value(seed) - float(self._references[seed])

        return sampled(difference, tolerance, self.sampling)

    def _value(self, seed: int) -> float:
        measure = self.measure
        assert measure is not None
        with unchanged(self.model), uncompiled():
            model = copy.deepcopy(self.model)
            seed_all(seed)
            return metrics.number("measure", measure, model, seed)


def _is_lack_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error)
