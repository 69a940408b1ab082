"""`bench`: a user's own step in several precisions, in turns within one process."""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from .. import arguments, compute, observers, session
from ..errors import (
    BenchError,
    HmpxError,
    OptionError,
    passing_over,
    raised_here,
    said_by,
    shown,
    suggestion,
)
from ..places import located
from ..recording import raised_at
from ..tensors import default_device_types, is_present, parse_device_type
from .measured import Bench, Measured, Quartiles, is_beyond_chance
from .runner import BASE, DEFAULT, VARIANTS, Conditions, Runner

_CLOCKS: Final = {"wall": time.perf_counter, "cpu": time.process_time}

#: Errors that end a variant but not the benchmark. `sys.exit` in a step would end it silently.
_FAILURES: Final = (Exception, SystemExit)


@session.restoring
def bench(
    make: Callable[[], Any],
    inputs: Any = None,
    *,
    variants: Iterable[str] | None = None,
    runs: int = 10,
    warmup: int = 3,
    run_s: float = 0.2,
    device: str | None = None,
    threads: int | None = None,
    clock: str = "wall",
    seed: int = 0,
    progress: bool | Callable[[str], object] = True,
    **conversion: Any,
) -> Bench:
    """Measures a program's own step in float32, under torch.autocast, and under hmpx.

    Each variant has its own step, made from the same seed, and its own random number stream.
    Variants take turns, and each run's time is divided by that of fp32 in the same turn.

    Args:
        make: Returns the step, a function without arguments; a number that it returns is the loss.
            Or returns a model, whose forward is measured in evaluation mode without gradients.
            Called for each variant, with torch unconverted.
        inputs: The model's arguments ([inputs](#inputs)), or a function that returns them.
        variants: Any of ``"autocast"``; values of ``legalize``: ``"auto"``, ``"fast"``, ``"always"``,
            ``"never"``; for a model ``"frozen"``; ``"fixes"``: with the lines that a record of its first
            step proposes. ``"fp32"`` always runs. None: the first three, and ``"frozen"`` for a model.
        runs: Number of runs per variant.
        warmup: Steps before the first run.
        run_s: Seconds per run, if more than one step fits.
        device: Type of the device that the step computes on; None for the accelerator, or the CPU.
        threads: torch's number of threads; None leaves it unchanged.
        clock: ``"wall"``, or ``"cpu"`` for the processor time of this process.
        seed: Seed of all random generators.
        progress: Whether to print a line to stderr every ten seconds, or a function that takes each line.
        **conversion: Options of `hmpx.convert` for all hmpx variants.

    Returns:
        All figures, with the error of each variant whose step raised one. After Ctrl-C, the runs that
        all variants have completed.

    Raises:
        BenchError: torch is already converted or observed; casts are switched off; ``make`` returns no
            step; fp32's step raises an error.
        OptionError: An argument has an invalid value.

    Example:
        >>> model = torch.nn.Linear(64, 8)
        >>> found = hmpx.bench(lambda: model, torch.ones(4, 64), device="cpu", runs=2, run_s=0.0)
        >>> [each.name for each in found.variants]
        ['fp32', 'autocast', 'auto', 'fast', 'frozen']
    """
    if not callable(make):
        raise OptionError(f"make must be a function that returns a step, not {shown(make)}")
    names = None if variants is None else _known(variants)
    runs = arguments.whole("runs", runs, 1)
    warmup = arguments.whole("warmup", warmup, 0)
    seed = arguments.whole("seed", seed, 0)
    if not isinstance(run_s, (int, float)) or not 0 <= run_s < math.inf:
        raise OptionError(f"run_s must be seconds, 0 or more, not {shown(run_s)}")
    if threads is not None:
        threads = arguments.whole("threads", threads, 1)
    say = arguments.progress(progress)
    session.check_names(bench, conversion)
    for name, ours in (("legalize", "variants"), ("device_types", "device")):
        if name in conversion:
            raise OptionError(f"bench decides {name} itself; it takes {ours} instead")
    if conversion.get("verbose") or conversion.get("isVerbose"):
        raise OptionError("verbose slows down the variants of hmpx, which log; leave it out")
    if session.is_converted():
        raise BenchError(
            "torch is converted already, but the fp32 variant needs the original; call hmpx.revert() first"
        )
    if observers.ATTACHED.value:
        raise BenchError(
            "an observer such as hmpx.record() or hmpx.watch() is attached, which slows only hmpx's variants; "
            "detach it before the benchmark"
        )
    conditions = _conditions(device, clock, seed, conversion)
    with contextlib.ExitStack() as on_exit:
        on_exit.callback(torch.set_num_threads, torch.get_num_threads())
        if threads is not None:
            torch.set_num_threads(threads)
        runners = _runners(make, inputs, names, conditions, on_exit)
        finished = _finished(runners, runs, warmup, run_s, say)
        measured = _summarized(runners)
        is_interrupted = finished < runs
        notes = [f"Interrupted: {finished} of {runs} runs."] if is_interrupted else []
        notes += _of_fixes(runners)
        device = conditions.device_type
        low_op = ""
        if not is_interrupted:
            with passing_over(*_FAILURES):  # the step has run so far, but may refuse modes
                low_op = runners[0].low_op()
        return Bench(
            f"cuda ({torch.cuda.get_device_name()})" if device == "cuda" else device,
            torch.get_num_threads(),
            clock,
            finished,
            seed,
            measured,
            (*notes, *_notes(measured, conditions)),
            is_interrupted,
            low_op,
            about=session.about_run(session.checked_policy(**conversion)),
        )


# --- arguments -----------------------------------------------------------------------------------


def _known(variants: object) -> list[str]:
    names = arguments.texts("variants", variants, 'names of variants, such as ["auto", "fast"]')
    for name in names:
        if name not in VARIANTS:
            known = ", ".join(map(repr, VARIANTS))
            raise OptionError(
                f"unknown variant {shown(name)} (there is: {known}){suggestion(name, VARIANTS)}"
            )
    return [BASE, *dict.fromkeys(name for name in names if name != BASE)]


def _conditions(
    device: str | None, clock: str, seed: int, conversion: Mapping[str, Any]
) -> Conditions:
    if device is None:
        (device_type,) = default_device_types()
    else:
        device_type = parse_device_type("device", device)
        if device_type == "meta" or not is_present(device_type):
            here = " or ".join(sorted({*default_device_types(), "cpu"}))
            raise OptionError(
                f"device must be one that steps can run on here, {here}, not {device_type!r}"
            )
    with session.convert(device_types={device_type}, **conversion) as tried:
        low = tried.policy.low_precision_type
        if not session.casts_enabled() or torch.is_autocast_enabled(device_type):
            raise BenchError(
                "bench is called inside of hmpx.disable_casts() or a region of torch.autocast, which its "
                "variants would be in as well: call it outside"
            )
    clock = arguments.choice("clock", clock, _CLOCKS)
    if clock == "cpu" and device_type != "cpu":
        raise OptionError(f"clock='cpu' does not measure {device_type}; use clock='wall'")
    low_dtype = low if isinstance(low, torch.dtype) else None
    return Conditions(device_type, low_dtype, conversion, _CLOCKS[clock], seed)


# --- variants ------------------------------------------------------------------------------------


def _runners(
    make: Callable[[], Any],
    inputs: Any,
    names: Sequence[str] | None,
    conditions: Conditions,
    on_exit: contextlib.ExitStack,
) -> list[Runner]:
    """Returns the variants, each with its step made; of the default ones those that can run."""
    runners: list[Runner] = []
    for name in DEFAULT if names is None else names:
        variant = VARIANTS[name]
        lack = ""
        if variant.is_autocast and conditions.low_dtype is None:
            lack = "torch.autocast supports only bfloat16 and float16; leave it out"
        elif variant.is_frozen and runners and runners[0].model is None:
            lack = "to freeze weights, bench needs the model: make() must return the model instead of a step"
        if lack and names is not None:
            raise BenchError(lack)
        if lack:
            continue
        runner = Runner(variant, conditions)
        on_exit.callback(runner.close)
        try:
            runner.make(make, inputs, [each.model for each in runners])
        except HmpxError:
            raise
        except raised_here(*_FAILURES) as error:
            raise BenchError(f"the step can't be made: {_told(error)}") from error
        if session.is_converted():
            session.revert()
            raise BenchError(
                "make() converts torch, which bench does itself: leave out hmpx.convert()"
            )
        runners.append(runner)
    return runners


def _of_fixes(runners: Sequence[Runner]) -> Iterator[str]:
    """Yields the lines that the variant with a record's fixes has, and the time that they save."""
    ran = {each.variant.name: each for each in runners if each.error is None}
    with_fixes, auto = ran.get("fixes"), ran.get("auto")
    if with_fixes is None or with_fixes.fixes is None:
        return
    if not with_fixes.fixes:
        yield "hmpx fixes is hmpx auto here: a record of its first step proposes no line of a list."
        return
    said = f"hmpx fixes has {', '.join(with_fixes.fixes)}"
    if auto is not None:
        ratios = [a / b for a, b in zip(with_fixes.run_times, auto.run_times, strict=True)]
        percent = 100 * (statistics.median(ratios) - 1)
        said += f": {abs(percent):.0f} % {'less' if percent < 0 else 'more'} time than hmpx auto"
        said += "" if is_beyond_chance(ratios) else ", within what runs vary"
    yield f"{said}."


def _notes(measured: Sequence[Measured], conditions: Conditions) -> Iterator[str]:
    base = measured[0].step_s
    if base is not None and base.high > 1.3 * base.low:  # the quartiles of its own times
        yield (
            f"fp32's own runs vary from {base.low / base.median:.2f} to {base.high / base.median:.2f} of "
            "their median, so don't trust these figures: the machine is busy. More runs help, and on the "
            'CPU one thread and the clock "cpu".'
        )
    if conditions.low_dtype is None:
        yield "There is no torch.autocast to this number format, which hmpx emulates."
        return
    device = conditions.device_type
    asked = {each.name for each in measured}
    if device != "cpu" or not asked & {"auto", "fast"}:
        return
    name = str(conditions.low_dtype).removeprefix("torch.")
    slow = [
        kind
        for kind in compute.KINDS
        if compute.capability(kind, device, conditions.low_dtype).is_slow
    ]
    if slow:
        yield f"Slow in {name} on this CPU, so computed in fp32 and rounded: {', '.join(slow)}."
    else:
        yield f"{name} is fast on this CPU, so `fast` computes what `auto` computes."


# --- turns ----------------------------------------------------------------------------------------


def _finished(
    runners: Sequence[Runner],
    runs: int,
    warmup: int,
    run_s: float,
    say: Callable[[str], object],
) -> int:
    """Warms up each variant, fp32 first, then runs them in turns, in reversed order every other turn.

    A variant whose step raises an error keeps the error and takes no more turns. Ctrl-C after the first
    turn ends all of them and keeps the measurements.
    """
    for runner in runners:
        say(f"{runner.variant.label}: warming up")
        _tried(runner, runner.warm_up, warmup, run_s)
    _check_alike(runners)
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


def _tried(runner: Runner, part: Callable[..., None], *args: Any) -> None:
    if runner.error is not None:
        return
    try:
        part(*args)
    except raised_here(*_FAILURES) as error:
        runner.error = error
    if runner.variant.name != BASE:
        return
    if runner.error is not None:
        raise BenchError(f"the step fails in fp32: {_told(runner.error)}") from runner.error
    if session.is_converted():
        session.revert()
        raise BenchError(
            "the step converts torch, which bench does itself: leave out hmpx.convert()"
        )


def _check_alike(runners: Sequence[Runner]) -> None:
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


def _summarized(runners: Sequence[Runner]) -> tuple[Measured, ...]:
    """Returns the figures of all variants; the others are compared with the first."""
    base = runners[0]
    losses = [each.losses for each in runners if each.error is None]
    steps = enumerate(zip(*losses, strict=False), 1)  # as many as all have made
    common = max((step for step, found in steps if None not in found), default=0)
    return tuple(_measured(each, base, common) for each in runners)


def _measured(runner: Runner, base: Runner, common: int) -> Measured:
    name, label = runner.variant.name, runner.variant.label
    if runner.error is not None:
        where = located(raised_at(runner.error))
        return Measured(name, label, error=said_by(runner.error), error_location=where)
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
    shapes = [[each.shape for each in several or ()] for several in (found, expected)]
    if not found or not expected or shapes[0] != shapes[1]:
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


def _told(error: BaseException) -> str:
    """Returns an error's class, its message, and the user's line that raised it, if known."""
    where = located(raised_at(error))
    return f"{said_by(error)}, at {where}" if where else said_by(error)
