"""What `hmpx.lint` and `hmpx.trace` cost: a checked training step, the steps between, and the mean of both.

    python benchmarks/lint.py [--tool trace] [--models gpt resnet] [--rounds 5] [--save]

A step is zero_grad, forward, loss, backward and AdamW's step, on one batch, in fp32 (where steps are fastest on
every CPU) and after hmpx.convert(). All run in one process and take turns.

plain    without the tool
checked  a step that lint checks, or trace writes
between  a step that it leaves alone
every N  the mean of one checked step and N - 1 others

ratio    time of a step / the plain one's of the same round: median over the rounds, by CPU time
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import time
import warnings

import timing
import torch
from observers import Training

import hmpx

EVERY = (10, 50, 100)
COLUMNS = ("ratio", "mean_s")


def opened(tool: str) -> contextlib.AbstractContextManager[object]:
    """Returns the block of a tool that checks the first step and leaves the third one alone."""
    return hmpx.trace(os.devnull, every=3) if tool == "trace" else hmpx.lint()


def measure(training: Training, tool: str, rounds: int) -> dict[str, dict[str, float]]:
    """Returns candidate -> figures."""
    seconds: dict[str, list[float]] = {"plain": [], "checked": [], "between": []}

    def step(name: str) -> None:
        begun = time.process_time()
        training.step()
        seconds[name].append(time.process_time() - begun)

    for _ in range(3):
        training.step()
    with opened(tool):
        training.step()  # warms up
    for _ in range(rounds):
        gc.collect()
        step("plain")
        with opened(tool):
            step("checked")
            training.step()
            step("between")
    ratios = {
        name: statistics.median(
            [one / plain for one, plain in zip(found, seconds["plain"], strict=True)]
        )
        for name, found in seconds.items()
    }
    for every in EVERY:
        ratios[f"every {every}"] = (ratios["checked"] + (every - 1) * ratios["between"]) / every
    plain = statistics.median(seconds["plain"])
    return {name: {"ratio": ratio, "mean_s": ratio * plain} for name, ratio in ratios.items()}


def main() -> None:
    """Prints a table for each model and size; with ``--save`` also writes all figures."""
    parser = timing.make_parser(__doc__)
    timing.add_device_options(parser, ("gpt", "resnet"), (), "models")
    timing.add_time_options(parser)
    parser.add_argument("--tool", choices=("lint", "trace"), default="lint")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    figures: dict[str, dict[str, dict[str, dict[str, dict[str, float]]]]] = {}
    for model in options.models:
        for size in options.sizes:
            for name in ("fp32", "hmpx"):
                with hmpx.convert() if name == "hmpx" else contextlib.nullcontext():
                    found = measure(
                        Training(model, size, options.device), options.tool, options.rounds
                    )
                figures.setdefault(model, {}).setdefault(size, {})[name] = found
                timing.show(f"training step of {model} {size}, {name}", found, COLUMNS)
    timing.save(
        options.save,
        "lint-trace" if options.tool == "trace" else "lint",
        {"figures": figures},
        device=options.device,
        threads=options.threads,
    )


if __name__ == "__main__":
    main()
