"""What legalized models cost under torch.compile, against fp32 under torch.compile.

    python benchmarks/compiled_models.py [--save] [--models gpt ...] [--sizes small] [--phases training]

training     a step of train.py: zero_grad, forward, loss, backward and AdamW's step
inference    a forward of the model in eval mode, without gradients

Each candidate is compiled by inductor, in a process of its own; the processes take turns, so that no
two run at a time. A step counts with the processor time of its process, compilers' excepted.

fp32, compiled          the program as it is: what the others are divided by
hmpx, compiled          after hmpx.convert()
hmpx frozen, compiled   after hmpx.convert() and hmpx.freeze(model, example); inference only

ratio        a turn counts with the median of its steps; time / fp32's of the same round: median over the
             rounds, and the extremes
least_ratio  the fastest step of all / fp32's

On a CPU that has bf16, `legalize="auto"` legalizes little. Take its vector instructions away, from
torch's kernels and from inductor's, which read the first variable, too:
ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 in the environment.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import candidates
import models
import timing
import torch
import train

BASE = candidates.BASE + candidates.COMPILED
CANDIDATES = ("fp32", "hmpx", "hmpx frozen")
COLUMNS = ("ratio", "ratio_min", "ratio_max", "least_ratio", "median_s", "min_s", "rounds")
FROZEN = "hmpx frozen"


def processor_times(step: Callable[[], Any], budget_s: float) -> list[float]:
    """Returns the seconds of processors that each step took: one step, and more while time is left."""
    found: list[float] = []
    end = time.perf_counter() + budget_s
    while not found or time.perf_counter() < end:
        start = time.process_time()
        step()
        found.append(time.process_time() - start)
    return found


class Training(train.Training):
    """One candidate's model, optimizer and batch."""

    def run(self, budget_s: float) -> list[float]:
        """Returns the seconds of each step."""
        return processor_times(self.step, budget_s)


class Inference:
    """One candidate's model and what it is called with."""

    def __init__(self, candidate: str, model: str, size: str, options: argparse.Namespace) -> None:
        candidates.convert(candidate, options.device)
        module = models.build(model, size, device=options.device).eval()
        inputs = models.batch(model, size, device=options.device, seed=1).inputs
        self._prepared = candidates.prepare(candidate, module, inputs)

    @torch.no_grad()
    def step(self) -> None:
        """Computes once."""
        self._prepared.model(*self._prepared.inputs)

    def run(self, budget_s: float) -> list[float]:
        """Returns the seconds of each step."""
        return processor_times(self.step, budget_s)


PHASES: dict[str, type[Training | Inference]] = {"training": Training, "inference": Inference}


def measure(
    phase: str, model: str, size: str, options: argparse.Namespace
) -> dict[str, dict[str, float | None]]:
    """Returns candidate -> figures."""
    chosen = dict.fromkeys([candidates.BASE, *(options.candidates or CANDIDATES)])
    names = [
        name + candidates.COMPILED for name in chosen if phase == "inference" or name != FROZEN
    ]
    with timing.workers(
        names, PHASES[phase], model, size, options, threads=options.threads
    ) as workers:
        timing.warm_up(workers, options.turn)
        turns = timing.take_turns(
            workers, base=BASE, rounds=options.rounds, turn_s=options.turn, limit_s=float("inf")
        )
    summary = timing.summarize(turns, BASE)
    least_s = summary[BASE]["min_s"]
    return {name: {**row, "least_ratio": row["min_s"] / least_s} for name, row in summary.items()}


def main() -> None:
    """Prints a table for each phase, model and size; with ``--save`` also writes all figures."""
    parser = timing.make_parser(__doc__)
    timing.add_device_options(parser, train.MODELS, CANDIDATES, "models")
    parser.add_argument("--phases", nargs="+", choices=tuple(PHASES), default=tuple(PHASES))
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument(
        "--turn",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="in each round; one step at least",
    )
    parser.set_defaults(
        attention="fused", backend="inductor", device="cpu", sizes=("medium",), threads=1
    )
    options = parser.parse_args()
    figures: dict[str, dict[str, dict[str, dict[str, dict[str, float | None]]]]] = {}
    for phase in options.phases:
        for model in options.models:
            for size in options.sizes:
                found = measure(phase, model, size, options)
                figures.setdefault(phase, {}).setdefault(model, {})[size] = found
                timing.show(f"{phase} of {model} {size}, compiled", found, COLUMNS)
                timing.save(
                    options.save,
                    "compiled_models",
                    {"figures": figures},
                    device=options.device,
                    threads=options.threads,
                )


if __name__ == "__main__":
    main()
