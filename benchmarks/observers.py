"""What seeing costs: `record`, `watch`, `trace`, `lint` and torch's own tools, on a training step.

    python benchmarks/observers.py [--models gpt] [--sizes small] [--rounds 30] [--save]

A step is zero_grad, forward, loss, backward and AdamW's step of a converted model, on one batch. All run
in one process and take turns, a few steps each; a round has a turn of each.

hmpx            after hmpx.convert()
record          inside hmpx.record()
watch           inside hmpx.watch()
watch every 10  inside hmpx.watch(every=10)
watch step      by hmpx.watch(step=closure): only results and gradients are looked at
trace           inside hmpx.trace(os.devnull)
lint            inside hmpx.lint(every=1)
monitor         inside hmpx.monitor(every=1)
monitor at 50   inside hmpx.monitor(), which checks one step in 50
anomaly         inside torch.autograd.detect_anomaly()
profiler        inside torch.profiler.profile()
DebugMode       inside torch.utils._debug_mode.DebugMode, and "hashes" with a norm of each tensor

ratio           time of a step / hmpx's of the same round: median over the rounds, and the quartiles
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import models
import timing
import torch

import hmpx

CANDIDATES = (
    "hmpx", "record", "watch", "watch every 10", "watch step", "trace", "lint", "monitor", "monitor at 50", "anomaly", "profiler", "DebugMode",
    "hashes",
)  # fmt: skip
COLUMNS = ("ratio", "ratio_low", "ratio_high", "median_s", "rounds")


class Training:
    """A converted model, its optimizer and a batch."""

    def __init__(self, model: str, size: str, device: str) -> None:
        self._module = models.build(model, size, device=device)
        self._batch = models.batch(model, size, device=device, seed=1)
        self._optimizer = torch.optim.AdamW(self._module.parameters(), lr=1e-4)

    def gradients(self) -> torch.Tensor:
        """Returns the loss, after its backward."""
        self._optimizer.zero_grad()
        loss = models.loss(self._module(self._batch.inputs), self._batch.labels)
        loss.backward()
        return loss

    def update(self) -> None:
        """Steps the optimizer."""
        self._optimizer.step()

    def step(self) -> None:
        """Trains once."""
        self.gradients()
        self.update()


@contextlib.contextmanager
def candidate(name: str, training: Training) -> Iterator[Callable[[], Any]]:
    """Yields the step of a candidate."""
    if name == "watch step":
        with hmpx.watch(step=training.gradients) as w:
            yield lambda: (w.step(), training.update())
        return
    with _region(name):
        yield training.step


def _region(name: str) -> contextlib.AbstractContextManager[Any]:
    if name == "hmpx":
        return contextlib.nullcontext()
    if name == "record":
        return hmpx.record()
    if name.startswith("watch"):
        return hmpx.watch(every=10 if name.endswith("10") else 1)
    if name == "trace":
        return hmpx.trace(os.devnull)
    if name == "lint":
        return hmpx.lint(every=1)
    if name.startswith("monitor"):
        return hmpx.monitor(every=50 if name.endswith("50") else 1, on_alarm="collect")
    if name == "anomaly":
        return torch.autograd.detect_anomaly()
    if name == "profiler":
        return torch.profiler.profile()
    from torch.utils._debug_mode import DebugMode  # it may be absent

    if name == "DebugMode":
        return DebugMode()
    stack = contextlib.ExitStack()
    stack.enter_context(DebugMode())
    stack.enter_context(DebugMode.log_tensor_hashes(hash_fn="norm"))
    return stack


def measure(
    model: str, size: str, names: list[str], *, device: str, rounds: int, steps: int
) -> dict[str, dict[str, float]]:
    """Returns candidate -> figures."""
    training = Training(model, size, device)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with hmpx.convert():
        for _ in range(3):
            training.step()
        for turn in range(rounds):
            order = names if turn % 2 else names[::-1]
            for name in order:
                count = {"watch every 10": 10, "monitor at 50": 50}.get(name, steps)
                with candidate(name, training) as step:
                    step()  # warms up; the first step of every ten is watched
                    for _ in range(9 if name == "watch every 10" else 0):
                        step()
                    gc.collect()  # what entering has left is not the steps' to pay for
                    begun = time.perf_counter()
                    for _ in range(count):
                        step()
                    if device == "cuda":
                        torch.cuda.synchronize()
                    seconds[name].append((time.perf_counter() - begun) / count)
    return {name: _summary(found, seconds["hmpx"]) for name, found in seconds.items()}


def _summary(found: list[float], base: list[float]) -> dict[str, float]:
    ratios = [one / other for one, other in zip(found, base, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        "ratio": statistics.median(ratios),
        "ratio_low": low,
        "ratio_high": high,
        "median_s": statistics.median(found),
        "rounds": len(found),
    }


def main() -> None:
    """Prints a table for each model and size; with ``--save`` also writes all figures."""
    parser = timing.make_parser(__doc__)
    timing.add_device_options(parser, ("gpt", "bert", "vit"), CANDIDATES, "models")
    timing.add_time_options(parser)
    parser.add_argument("--steps", type=int, default=5, help="of a candidate in each round")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    names = list(dict.fromkeys(["hmpx", *(options.candidates or CANDIDATES)]))
    figures: dict[str, dict[str, Any]] = {}
    for model in options.models:
        for size in options.sizes:
            found = measure(
                model,
                size,
                names,
                device=options.device,
                rounds=options.rounds,
                steps=options.steps,
            )
            figures.setdefault(model, {})[size] = found
            timing.show(f"training step of {model} {size}", found, COLUMNS)
            timing.save(
                options.save,
                "observers",
                {"figures": figures},
                device=options.device,
                threads=options.threads,
            )


if __name__ == "__main__":
    main()
