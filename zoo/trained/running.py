"""Runs trained models in each mode and judges them by their task: ``python -m zoo --trained``."""

from __future__ import annotations

import copy
import fnmatch
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.overrides import TorchFunctionMode

import hmpx
from hmpx.tuning.candidates import assigned, policy_source

from ..measuring import SEED, distance, first_line, floating_tensors
from ..modes import TRAINED, Mode
from ..results import ROOT, Results, version
from .task import Batch, Judged, Outputs, Task

Line = dict[str, Any]
#: What `hmpx.tune` looks for a set of ops for.
TUNED = ("bfloat16", "float8_e4m3fn", "mxfp4_e2m1")
#: Ways to run a trained model, and what it is tuned for.
MODES = (*TRAINED, *(f"tune {each}" for each in TUNED))
LISTS = ROOT / "examples" / "trained_lists"
#: Within which share of the task's measure a set is to stay.
TOLERANCE = 0.01
_BUDGET = 100
_BATCHES = 3
_TUNING_SEEDS = range(1, 9)

#: A set is searched within the first part of the tolerance, and within the next one if it fails on one of these
#: batches: of each search, others.
_SEARCHES = ((1.0, range(101, 107)), (0.9, range(201, 207)), (0.7, range(211, 217)))


class _InDouble(TorchFunctionMode):
    """Has code that asks for float32 compute in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = [torch.float64 if each is torch.float32 else each for each in args]
        named = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **named)


def _doubled(value: Any) -> Any:
    """Returns nested values with their floating tensors in float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {name: _doubled(each) for name, each in value.items()}
    return [_doubled(each) for each in value] if isinstance(value, list) else value


def exactly(judged: Judged, batch: Batch) -> Outputs:
    """Returns the outputs in float64."""
    model = copy.deepcopy(judged).double()
    torch.set_default_dtype(torch.float64)
    try:
        with _InDouble(), torch.no_grad():
            return {**model(**_doubled(batch)), "truth": batch.get("truth")}
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def _in(mode: Mode, judged: Judged, example: Batch) -> Iterator[None]:
    frozen: AbstractContextManager[Any] = nullcontext()
    with mode.process("cpu"), torch.set_grad_enabled(False):
        if mode.is_frozen:
            frozen = hmpx.freeze(judged, example)
        with frozen, mode.region("cpu"):
            yield


def _compared(outputs: Outputs) -> list[Tensor]:
    return list(floating_tensors({k: v for k, v in outputs.items() if k != "truth"}))


def measure(
    task: Task, judged: Judged, mode: Mode, batches: Sequence[Batch], exact: Sequence[Outputs]
) -> Line:
    """Returns the scores of a mode and its error to float64, means of all batches, and what it costs."""
    found, times = [], []
    with _in(mode, judged, batches[0]):
        for batch in batches:
            start = time.process_time()
            found.append(judged(**batch))
            times.append(time.process_time() - start)
        with hmpx.record() as recorded:
            judged(**batches[0])
    total = recorded.report().totals
    errors = [
        distance(_compared(f), _compared(e)).relative for f, e in zip(found, exact, strict=True)
    ]
    known = [error for error in errors if error is not None]
    return {
        "scores": {
            name: statistics.fmean(score(f, e) for f, e in zip(found, exact, strict=True))
            for name, score in task.scores.items()
        },
        "outputs": statistics.fmean(known) if len(known) == len(errors) else None,
        "seconds": min(times),
        "flops": total.low_flops / total.flops if total.flops else None,
        "bytes": total.low_bytes / total.bytes if total.bytes else None,
        "errors": {},
    }


def change(task: Task, outputs: Outputs, fp32: Outputs) -> float:
    """Returns how far the task's measure is from fp32's, as a share of it."""
    score = next(iter(task.scores.values()))
    found = score(outputs, fp32)
    if task.is_distance:
        return found / 100
    expected = score(fp32, fp32)
    return abs(found - expected) / abs(expected)


def tuned(task: Task, judged: Judged, low_type: str) -> Line:
    """Returns the smallest set that keeps the measure, and what it does on seeds not seen."""
    start = time.process_time()
    for part, seeds in _SEARCHES:
        best = hmpx.tune(
            judged,
            [task.batch(seed) for seed in _TUNING_SEEDS],
            metric=lambda low, fp32: change(task, low, fp32),
            tolerance=part * TOLERANCE,
            low_precision_type=low_type,
            legalize="always",  # "auto" goes by timings
            budget=_BUDGET,
            progress=False,
        )
        seconds = time.process_time() - start
        fresh = []
        for seed in seeds:
            batch = task.batch(seed)
            with torch.no_grad():
                fp32 = judged(**batch)
                with hmpx.convert(**best.lists):
                    fresh.append(change(task, judged(**batch), fp32))
        if max(fresh) <= TOLERANCE:
            break
    _write(task, low_type, best)
    within = "" if part == 1.0 else f", within {part * TOLERANCE:.1%}"
    return {
        "kept": sorted(best.kept), "candidates": len(best.candidates), "error": best.error,
        "batches": f"{len(_TUNING_SEEDS)}, limit{within}", "all_low": best.all_low_error, "fresh": fresh,
        "evaluations": best.evaluations,
        "flops": best.low_precision_flops_share, "bytes": best.low_precision_bytes_share,
        "is_complete": best.is_complete, "stopped_by": best.stopped_by,
        "seconds": seconds, "errors": {},
    }  # fmt: skip


def file_of(task: Task, low_type: str) -> Path:
    """Returns the policy file of a search."""
    name = "".join(c if c.isalnum() else "_" for c in task.name.lower())
    return LISTS / f"{name}.{low_type}.yaml"


def _write(task: Task, low_type: str, best: hmpx.Tuned) -> None:
    source = policy_source(assigned(best.candidates, best.kept, low_type), low_type)
    path = file_of(task, low_type)
    path.parent.mkdir(exist_ok=True)
    measured = next(iter(task.scores))
    path.write_text(
        f"# {task.name}: {measured}, within {TOLERANCE:.0%} of fp32's.\n"
        f"# {len(best.kept)} of {len(best.candidates)} ops kept out of {low_type}. Use: "
        f'hmpx.convert(policy="{path.name}", legalize="always")\n'
        + yaml.safe_dump(source, sort_keys=False),
        encoding="utf-8",
    )


def sweep(
    tasks: Sequence[Task],
    results: Results,
    modes: Sequence[str] | None = None,
    *,
    again: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Runs what has no results yet.

    Args:
        tasks: The models.
        results: Gets a line for each model and mode.
        modes: Of `MODES`; None for all.
        again: Whether what has results runs, too.
        say: Is called with each line of text.
    """
    torch.set_num_threads(1)
    chosen = modes or MODES
    for task in tasks:
        if not task.is_installed:
            say(
                f"{task.name}: left out, since {task.module} isn't installed: pip install {task.package}"
            )
            continue
        work = [
            (mode, version(mode))
            for mode in chosen
            if again or not results.is_known((task.package, task.name, mode, SEED), version(mode))
        ]
        if not work:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            judged = Judged(task).eval()
            batches = [task.batch(SEED + k) for k in range(_BATCHES)]
            exact = [exactly(judged, batch) for batch in batches if set(chosen) & {*TRAINED}]
            for mode, made_with in work:
                try:
                    if mode in TRAINED:
                        line = measure(task, judged, TRAINED[mode], batches, exact)
                    else:
                        line = tuned(task, judged, mode.removeprefix("tune "))
                except Exception as error:
                    line = {"errors": {"run": first_line(error)}}
                results.add({
                    "library": task.package, "family": "trained", "model": task.name,
                    "mode": mode, "seed": SEED, "version": made_with, **line,
                })  # fmt: skip
                say(
                    f"{task.name:24} {mode:20} {line.get('scores', line.get('kept', line['errors']))}"
                )


def chosen(tasks: Sequence[Task], patterns: Sequence[str] | None) -> list[Task]:
    """Returns the tasks whose name or package is asked for."""
    return [
        task
        for task in tasks
        if not patterns
        or any(fnmatch.fnmatchcase(n, p) for p in patterns for n in (task.name, task.module))
    ]
