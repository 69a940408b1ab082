"""Runs variants in turns, and summarizes their runs."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from .. import session
from ..errors import BenchError, said_by
from ..places import located
from ..recording import raised_at
from .result import Measured, Quartiles
from .runner import Runner
from .variants import BASE

#: Errors that end a variant but not the benchmark. `sys.exit` in a step would end it silently.
FAILURES: Final = (Exception, SystemExit)


def take(
    runners: Sequence[Runner],
    runs: int,
    warmup: int,
    run_s: float,
    progress: Callable[[str], object] | None = None,
) -> int:
    """Warms up each variant, fp32 first, then runs them in turns, in reversed order every other turn.

    A variant whose step raises an error keeps the error and takes no more turns. Ctrl-C after the first
    turn ends all of them and keeps the measurements.
    """
    say = progress or (lambda line: None)
    for runner in runners:
        say(f"{runner.variant.label}: warming up")
        _tried(runner, lambda each=runner: each.warm_up(warmup, run_s))  # type: ignore[misc]
    _check(runners)
    try:
        for turn in range(runs):
            gc.collect()
            say(f"run {turn + 1} of {runs}")
            for runner in runners if turn % 2 == 0 else reversed(runners):
                _tried(runner, runner.run)
        say("memory")
        for runner in runners:
            _tried(runner, runner.measure_memory)
    except KeyboardInterrupt:
        finished = min(len(each.run_times) for each in runners if each.error is None)
        if not finished:
            raise
        for each in runners:
            del each.run_times[finished:]
        return finished
    return runs


def _tried(runner: Runner, part: Callable[[], None]) -> None:
    if runner.error is not None:
        return
    try:
        part()
    except FAILURES as error:
        runner.error = error
    if runner.variant.name != BASE:
        return
    if runner.error is not None:
        raise BenchError(f"the step fails in fp32: {told(runner.error)}") from runner.error
    if session.is_converted():
        session.revert()
        raise BenchError(
            "the step converts torch, which bench does itself: leave out hmpx.convert()"
        )


def _check(runners: Sequence[Runner]) -> None:
    is_cuda = runners[0].conditions.device_type == "cuda"
    if is_cuda and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise BenchError(
            "the step has not used CUDA: move its model and data there, or choose device='cpu' "
            "(--device cpu)"
        )
    owners: dict[int, Runner] = {}
    for runner in runners:
        for parameter in runner.trained:
            owner = owners.setdefault(id(parameter), runner)
            if owner is not runner:
                raise BenchError(
                    f"{owner.variant.label} and {runner.variant.label} train the same model, so each goes on "
                    "from the other's weights: build model and optimizer in the function that makes the "
                    "step, and not in a module that is imported once"
                )


# --- figures -------------------------------------------------------------------------------------


def summarized(runners: Sequence[Runner]) -> tuple[Measured, ...]:
    """Returns the figures of all variants; the others are compared with the first."""
    base = runners[0]
    losses = [each.losses for each in runners if each.error is None]
    steps = enumerate(zip(*losses, strict=False), 1)  # as many as all have made
    common = max((step for step, found in steps if None not in found), default=0)
    return tuple(_measured(each, base, common) for each in runners)


def _measured(runner: Runner, base: Runner, common: int) -> Measured:
    name, label = runner.variant.name, runner.variant.label
    if runner.error is not None:
        said, where = said_by(runner.error), _place_of(runner.error)
        return Measured(name, label, error=said, error_location=where)
    ratios = [own / other for own, other in zip(runner.run_times, base.run_times, strict=True)]
    loss, of_base = (each.losses[common - 1] if common else None for each in (runner, base))
    numbers = enumerate(runner.losses[:common], 1)
    bad = [step for step, each in numbers if each is not None and not math.isfinite(each)]
    return Measured(
        name,
        label,
        ratio=Quartiles.of(ratios),
        ratios=tuple(ratios),
        step_s=Quartiles.of(runner.run_times),
        steps=runner.steps,
        loss=loss,
        loss_step=common,
        loss_difference=None if loss is None or of_base is None else loss - of_base,
        not_finite_at=min(bad, default=None),
        output_error=_relative_error(runner.outputs, base.outputs),
        memory_bytes=runner.memory_bytes,
    )


def _relative_error(
    found: Sequence[Tensor] | None, expected: Sequence[Tensor] | None
) -> float | None:
    """Returns the norm of the difference over the expected norm; None without matching tensors.

    Infinities and NaN in the same places, as in a mask, count as equal.
    """
    if (
        not found
        or not expected
        or [each.shape for each in found] != [each.shape for each in expected]
    ):
        return None
    difference = whole = 0.0
    for a, b in zip(found, expected, strict=True):
        actual, exact = a.double(), b.double()
        is_same = (actual == exact) | (actual.isnan() & exact.isnan())
        difference += float((actual - exact).masked_fill(is_same, 0.0).square().sum())
        whole += float(exact.masked_fill(~exact.isfinite(), 0.0).square().sum())
    if whole:
        return float((difference / whole) ** 0.5)
    return None if 0.0 < difference < math.inf else difference


def told(error: BaseException) -> str:
    """Returns an error's class, its message, and the user's line that raised it, if known."""
    where = _place_of(error)
    return f"{said_by(error)}, at {where}" if where else said_by(error)


def _place_of(error: BaseException) -> str:
    where = raised_at(error)
    return located(where) if where else ""
