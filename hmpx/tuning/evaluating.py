"""Evaluates a set: the model runs with it in fp32 and all else in low precision; how far off is it?"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from .. import arguments, session
from ..errors import OptionError, shown
from ..observers import OpCall, attach
from ..tensors import LOW_DTYPES, Opaque, parts_of, widened
from ..torch_internals import uncompiled
from ..torch_state import disable_casts, unchanged
from . import metrics
from .asking import Outcome, Seen
from .assignment import assigned, policy_of, reads_first
from .batches import FRESH, TUNING, seed_all
from .candidates import Candidate, Kept, Spot
from .metrics import sampled
from .request import Request

#: Added to the seed on fresh inputs.
_OTHER_SEED: Final = 1_000

#: A conversion holds for the whole process, so threads take turns.
_TURNS: Final = threading.RLock()


@dataclass
class Task:
    """All that an evaluation needs; what is pickled to other processes.

    Attributes:
        request: What `tune` was asked for.
        candidates: What may be kept, and
        spots: the FLOPs and bytes of the spots that these stand for.
        threads: How many threads torch uses: sums depend on it.
    """

    request: Request
    candidates: tuple[Candidate, ...] = ()
    spots: Mapping[Spot, tuple[int, int]] = field(default_factory=dict)
    threads: int = field(default_factory=torch.get_num_threads)
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
        policy = policy_of(
            assigned(self.candidates, kept, self.request.low_type), self.request.low_type
        )
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
        if self.request.measure is not None:
            return Outcome(self._measured(policy, inputs, tolerance))
        expected = self.reference(inputs)
        observed = Observed()
        is_watched = any(each.may_follow for each in self.candidates)
        with (
            # before the conversion: wrappers are made once, with it
            attach(observed, every_op=True) if is_watched else contextlib.nullcontext(),
            session.restore(policy, self.request.device_types, self.request.options, False),
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
        if self.request.measure is not None:
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
        with unchanged(self.request.model), uncompiled(), torch.no_grad():
            for index, batch in enumerate(self.request.inputs[inputs]):
                seed_all(self.request.seed + offset + index)
                found.append(arguments.has_run("model", batch.run(self.request.model)))
        return found

    def _distance(self, found: list[Any], expected: list[Any], inputs: str) -> float:
        with torch.no_grad(), disable_casts():
            if self.request.metric == "relative_l2":
                return metrics.relative_l2(found, expected)
            if self.request.metric == "kl":
                return metrics.kl(found, expected)
            if self.request.metric == "loss":
                return metrics.relative_change(
                    self._losses(found, inputs), self._losses(expected, inputs)
                )
            if not callable(self.request.metric):
                raise OptionError(f"unknown metric {self.request.metric!r}")
            return metrics.of_user(self.request.metric)(
                [*map(widened, found)], [*map(widened, expected)]
            )

    def _losses(self, outputs: list[Any], inputs: str) -> list[float]:
        return [
            metrics.number("loss_fn", metrics.loss_of, self.request.loss_fn, widened(output), batch)
            if self.request.loss_fn is not None
            else float(metrics.loss_of(None, output, batch))
            for output, batch in zip(outputs, self.request.inputs[inputs], strict=True)
        ]

    def _measured(self, policy: Any, inputs: str, tolerance: float) -> float:
        """Returns what a measure with noise loses: the upper end of what paired samples leave open."""
        offset = _OTHER_SEED if inputs == FRESH else 0

        def difference(index: int) -> float:
            seed = self.request.seed + offset + index
            if seed not in self._references:
                with disable_casts():
                    self._references[seed] = self._value(seed)
            if not math.isfinite(self._references[seed]):
                raise OptionError(f"measure is not finite in fp32, with seed {seed}")
            with session.restore(policy, self.request.device_types, self.request.options, False):
                return self._value(seed) - float(self._references[seed])

        return sampled(difference, tolerance, self.request.samples)

    def _value(self, seed: int) -> float:
        measure = self.request.measure
        assert measure is not None
        with unchanged(self.request.model), uncompiled():
            model = copy.deepcopy(self.request.model)
            seed_all(seed)
            return metrics.number("measure", measure, model, seed)


def _is_lack_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error)


class Observed:
    """An observer that counts calls: all, those in low precision, those that were given nothing else."""

    def __init__(self) -> None:
        """Has seen none."""
        self._counts: dict[Spot, list[int]] = {}

    def __call__(self, call: OpCall) -> None:
        """Counts one call."""
        if not call.input_dtypes:
            return
        counts = self._counts.setdefault((call.op, call.module), [0, 0, 0])
        given = call.input_dtypes[:1] if reads_first(call.op) else call.input_dtypes
        dtype = call.dtype
        if dtype is None:  # it was left alone: it computes in what it is given
            dtype = functools.reduce(torch.promote_types, call.cast_dtypes)
        counts[0] += 1
        counts[1] += dtype in LOW_DTYPES
        counts[2] += all(each in LOW_DTYPES for each in given)

    def seen(
        self, candidates: Iterable[Candidate], spots: Mapping[Spot, tuple[int, int]]
    ) -> dict[str, Seen]:
        """Returns what was seen of each candidate that may follow; ``spots`` has what its calls cost."""
        return {
            each.name: Seen(
                self._share([(spot, spots[spot][0]) for spot in sorted(each.spots)], 1),
                self._share([(spot, spots[spot][1]) for spot in sorted(each.spots)], 1),
                self._share([(spot, spots[spot][1]) for spot in sorted(each.spots)], 2),
            )
            for each in candidates
            if each.may_follow
        }

    def _share(self, costs: Iterable[tuple[Spot, int]], counted: int) -> float:
        """Returns the share of a cost that is of calls that were counted; of each spot all cost the same."""
        part = whole = 0.0
        for spot, cost in costs:
            counts = self._counts.get(spot, [0, 0, 0])
            whole += cost
            part += cost * counts[counted] / (counts[0] or 1)
        return part / whole if whole else 1.0
