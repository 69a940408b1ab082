"""Inference in mixed precision: time and memory of models that read their weights for few inputs.

    python benchmarks/inference.py [--save] [--cases decode ...] [--sizes small] [--compile]

decode          a GPT writes one text, a token a step: 16 tokens are in its cache, up to 64 follow
rows 16         the same GPT on 16 texts of one token: products of 16 rows with each weight
rows 256        the same on 256
resnet 1        ResNet on one image
resnet 32       ResNet on 32 images

Every candidate has the same weights and a process of its own; the processes take turns, so that no
two run at a time. Autograd is off: `inference_mode`, and `no_grad` for compiled candidates.

fp32            the program as it is
autocast        inside torch.autocast(bfloat16)
bf16            after model.bfloat16()
hmpx            after hmpx.convert()
hmpx frozen     after hmpx.convert() and hmpx.freeze(model, example)

ratio           time of a step / fp32's of the same round: median over the rounds, and the extremes
weight_ratio    bytes of parameters and buffers / fp32's
process         memory that the process took from before the model was built until after the steps;
                on CUDA torch's allocator at the end
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from typing import Any

import candidates
import meter
import models
import timing
import torch
from torch import Tensor

PREFILL, DECODED = 16, 64  # tokens

CANDIDATES = ("fp32", "autocast", "bf16", "hmpx", "hmpx frozen")
COLUMNS = (
    "ratio", "ratio_min", "ratio_max", "median_s", "min_s", "rounds", "weight_ratio",
    "process_bytes",
)  # fmt: skip

#: Case -> the model, and how many examples at once.
CASES = {
    "decode": ("decoder", 1),
    "rows 16": ("decoder", 16),
    "rows 256": ("decoder", 256),
    "resnet 1": ("resnet", 1),
    "resnet 32": ("resnet", 32),
}


class Inference:
    """One candidate's model and what it is called with."""

    def __init__(self, candidate: str, case: str, size: str, options: argparse.Namespace) -> None:
        self._device = options.device
        is_compiled = candidate.endswith(candidates.COMPILED)
        self._no_grad = torch.no_grad if is_compiled else torch.inference_mode
        name, rows = CASES[case]
        inputs = models.batch(name, size, device=self._device, rows=rows).inputs
        if name == "decoder":
            inputs = inputs[:, :1]
        candidates.convert(candidate, self._device)
        models.build(name, "small", device=self._device)  # loads what a model needs, then is gone
        meter.settle()
        self._first_bytes = meter.used_bytes(self._device)
        module = models.build(name, size, device=self._device).eval()
        self._prepared = candidates.prepare(candidate, module, inputs, backend=options.backend)
        self.step = self._make_decoding() if case == "decode" else self._forward

    def _running(self) -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        stack.enter_context(self._no_grad())
        stack.enter_context(self._prepared.region())
        return stack

    def _forward(self) -> Tensor:
        with self._running():
            return self._prepared.model(*self._prepared.inputs)

    def _make_decoding(self) -> Callable[[], Tensor]:
        module: Any = self._prepared.module
        length = PREFILL + DECODED
        places = torch.arange(length, device=self._device).split(1)
        text = torch.arange(PREFILL, device=self._device)[None]  # any tokens will do
        with self._running():
            cache = module.new_cache(1)
            first = module(text, text[0], cache)[:, -1:].argmax(-1)
        token, place = first, PREFILL

        def step() -> Tensor:
            nonlocal token, place
            if place == length:  # from here on the text is overwritten; the prefill stays
                token, place = first, PREFILL
            with self._running():
                logits = self._prepared.model(token, places[place], cache)
                token = logits[:, -1:].argmax(-1)  # [1, 1]
            place += 1
            return token

        return step

    def run(self, budget_s: float) -> list[float]:
        """Returns the seconds of each step."""
        return timing.durations(self.step, budget_s, self._device)

    def sizes(self) -> dict[str, int | None]:
        """Returns what the weights take, and the process."""
        meter.settle()
        used = meter.used_bytes(self._device)
        return {
            "weight_bytes": candidates.weight_bytes(self._prepared.module),
            "process_bytes": meter.difference(used, self._first_bytes),
        }


def measure(
    case: str, size: str, names: list[str], options: argparse.Namespace
) -> dict[str, dict[str, float | None]]:
    """Returns candidate -> figures."""
    with timing.workers(names, Inference, case, size, options, threads=options.threads) as workers:
        timing.warm_up(workers, options.warm_up)
        turns = timing.take_turns(
            workers,
            base=candidates.BASE,
            rounds=options.rounds,
            turn_s=options.turn,
            limit_s=options.limit,
        )
        sizes = {name: worker.call("sizes") for name, worker in workers.items()}
    base_bytes = sizes[candidates.BASE]["weight_bytes"]
    return {
        name: {**summary, **sizes[name], "weight_ratio": sizes[name]["weight_bytes"] / base_bytes}
        for name, summary in timing.summarize(turns, candidates.BASE).items()
    }


def main() -> None:
    """Prints a table for each case and size; with ``--save`` also writes all figures."""
    parser = timing.make_parser(__doc__)
    timing.add_device_options(parser, tuple(CASES), CANDIDATES, "cases")
    timing.add_time_options(parser)
    options = parser.parse_args()
    compiled = CANDIDATES if options.compile else ()
    names = candidates.choose(options.candidates, CANDIDATES, compiled)
    figures: dict[str, dict[str, dict[str, dict[str, float | None]]]] = {}
    for case in options.cases:
        for size in options.sizes:
            found = measure(case, size, names, options)
            figures.setdefault(case, {})[size] = found
            timing.show(f"inference, {case}, {size}", found, COLUMNS)
            timing.save(
                options.save,
                "inference",
                {"figures": figures},
                device=options.device,
                threads=options.threads,
            )


if __name__ == "__main__":
    main()
