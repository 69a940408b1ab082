"""A training step in mixed precision: time, memory and loss, against fp32.

    python benchmarks/train.py [--save] [--models gpt ...] [--sizes small] [--compile]

A step is zero_grad, forward, loss, backward and AdamW's step, on one batch. Every candidate has the
same first weights, and a process of its own; the processes take turns, so that no two run at a time. Subnormal numbers
are flushed to zero.

fp32            the program as it is
autocast        its forward and loss inside torch.autocast(bfloat16)
hmpx            after hmpx.convert()
hmpx fast       after hmpx.convert(legalize="fast")
bf16            after model.bfloat16(): the weights and the optimizer are low, too

ratio           time of a step / fp32's of the same round: median over the rounds, and the extremes
peak            memory at its highest in the steps after warming up: on the CPU resident memory,
                less what there was when the model had been built; on CUDA all of torch's
loss_minus_fp32 loss after `--steps` steps less fp32's; after fewer, if it took too long
"""

from __future__ import annotations

import argparse
import time

import candidates
import meter
import models
import timing
import torch

CANDIDATES = ("fp32", "autocast", "bf16", "hmpx", "hmpx fast")
COMPILED = ("fp32", "hmpx")
MODELS = ("gpt", "llama", "bert", "vit", "resnet")
COLUMNS = (
    "ratio", "ratio_min", "ratio_max", "median_s", "min_s", "rounds", "peak_bytes", "loss_minus_fp32"
)  # fmt: skip


class Training:
    """One candidate's model, optimizer and batch."""

    def __init__(self, candidate: str, model: str, size: str, options: argparse.Namespace) -> None:
        self._device = options.device
        torch.set_flush_denormal(True)  # AdamW's moments become subnormal, which CPUs take long for
        candidates.convert(candidate, self._device)
        module = models.build(
            model,
            size,
            device=options.device,
            is_attention_explicit=options.attention == "explicit",
        )
        batch = models.batch(model, size, device=options.device, seed=1)
        self._labels = batch.labels
        self._prepared = candidates.prepare(
            candidate, module, batch.inputs, backend=options.backend
        )
        self._optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        self._losses: list[torch.Tensor] = []
        meter.settle()
        self._built_bytes = meter.used_bytes(self._device)

    def step(self) -> None:
        """Trains once."""
        self._optimizer.zero_grad()
        with self._prepared.region():
            loss = models.loss(self._prepared.model(*self._prepared.inputs), self._labels)
        loss.backward()
        self._optimizer.step()
        self._losses.append(loss.detach())

    def run(self, budget_s: float) -> list[float]:
        """Returns the seconds of each step."""
        return timing.durations(self.step, budget_s, self._device)

    def reset_peak(self) -> None:
        """Lets `peak_bytes` start anew."""
        meter.settle()
        meter.reset_peak(self._device)

    def losses(self, steps: int, budget_s: float) -> list[float]:
        """Returns the loss of each of the first steps; trains on if there were fewer and time is left."""
        end = time.perf_counter() + budget_s
        while len(self._losses) < steps and time.perf_counter() < end:
            self.step()
        return [loss.item() for loss in self._losses[:steps]]

    def peak_bytes(self) -> int | None:
        """Returns the most memory in use since `reset_peak`."""
        peak = meter.peak_bytes(self._device)
        return peak if self._device == "cuda" else meter.difference(peak, self._built_bytes)


def measure(
    model: str, size: str, names: list[str], options: argparse.Namespace
) -> dict[str, dict[str, float | None]]:
    """Returns candidate -> figures."""
    with timing.workers(names, Training, model, size, options, threads=options.threads) as workers:
        timing.warm_up(workers, options.warm_up)
        for worker in workers.values():
            worker.call("reset_peak")
        turns = timing.take_turns(
            workers,
            base=candidates.BASE,
            rounds=options.rounds,
            turn_s=options.turn,
            limit_s=options.limit,
        )
        figures: dict[str, dict[str, float | None]] = {
            name: {**summary} for name, summary in timing.summarize(turns, candidates.BASE).items()
        }
        for name, worker in workers.items():
            figures[name]["peak_bytes"] = worker.call("peak_bytes")
        losses = {
            name: worker.call("losses", options.steps, options.limit)
            for name, worker in workers.items()
        }
    for name, found in losses.items():
        compared = min(len(found), len(losses[candidates.BASE]))
        figures[name]["loss_steps"] = compared
        figures[name]["loss"] = found[compared - 1]
        figures[name]["loss_minus_fp32"] = (
            found[compared - 1] - losses[candidates.BASE][compared - 1]
        )
    return figures


def main() -> None:
    """Prints a table for each model and size; with ``--save`` also writes all figures."""
    parser = timing.make_parser(__doc__)
    timing.add_device_options(parser, MODELS, CANDIDATES, "models")
    timing.add_time_options(parser)
    parser.add_argument("--steps", type=int, default=20, help="after which losses are compared")
    parser.add_argument("--attention", choices=("fused", "explicit"), default="fused", help="GPT's")
    options = parser.parse_args()
    compiled = COMPILED if options.compile else ()
    names = candidates.choose(options.candidates, CANDIDATES, compiled)
    figures: dict[str, dict[str, dict[str, dict[str, float | None]]]] = {}
    for model in options.models:
        for size in options.sizes:
            found = measure(model, size, names, options)
            figures.setdefault(model, {})[size] = found
            timing.show(f"training step of {model} {size}", found, COLUMNS)
            timing.save(
                options.save,
                "train",
                {"figures": figures},
                device=options.device,
                threads=options.threads,
            )


if __name__ == "__main__":
    main()
