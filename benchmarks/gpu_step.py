"""A training step of GPT on a GPU: its time, how long the GPU works, kernels, Python's time, memory.

    python benchmarks/gpu_step.py [--compile] [--size medium] [--rounds 2] [--steps 25] [--save]

All candidates share a process and take turns, so that one machine measures them. A step is zero_grad, forward,
loss, backward and AdamW's step. Where the GPU works for less than a step takes, it waits for Python.

fp32              the program as it is
autocast          forward and loss inside torch.autocast(bfloat16)
hmpx              after hmpx.convert()
hmpx, cast again  after hmpx.convert(keep_weight_casts=False)

With ``--compile`` the model is compiled by torch.compile.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import models
import timing
import torch
from torch.autograd import DeviceType

import hmpx

CANDIDATES: dict[str, Mapping[str, Any] | None] = {
    "fp32": None,
    "autocast": None,
    "hmpx": {},
    "hmpx, cast again": {"keep_weight_casts": False},
}
COLUMNS = ("step_s", "gpu_s", "kernels", "forward_s", "backward_s", "optimizer_s", "peak_bytes")
WARM_UP = 4


def training(name: str, size: str, *, compiled: bool) -> Callable[[], list[float]]:
    """Returns a step of a candidate: it returns Python's seconds at its beginning and after each phase."""
    model, batch = (make("gpt", size, device="cuda") for make in (models.build, models.batch))
    if compiled:
        torch.compiler.reset()
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    is_peer = name == "autocast"

    def step() -> list[float]:
        times = [time.perf_counter()]
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16) if is_peer else contextlib.nullcontext():
            loss = models.loss(model(batch.inputs), batch.labels)
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        optimizer.step()
        return [*times, time.perf_counter()]

    return step


def on_device(events: Iterable[Any]) -> list[Any]:
    """Returns a profile's events on the device, without those of the host that started them."""
    return [event for event in events if event.device_type == DeviceType.CUDA]


def measure(name: str, size: str, steps: int, *, compiled: bool) -> dict[str, float]:
    """Returns the figures of a candidate."""
    options = CANDIDATES[name]
    with contextlib.nullcontext() if options is None else hmpx.convert(**options):
        step = training(name, size, compiled=compiled)
        for _ in range(WARM_UP):
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        seconds, phases = [], []
        for _ in range(steps):
            times = step()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - times[0])
            phases.append([end - begin for begin, end in itertools.pairwise(times)])
        peak = torch.cuda.max_memory_allocated()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
    events = on_device(profile.key_averages())
    forward, backward, optimizer = map(statistics.median, zip(*phases, strict=True))
    return {
        "step_s": statistics.median(seconds),
        "gpu_s": sum(event.self_device_time_total for event in events) / 1e6,
        "kernels": sum(event.count for event in events),
        "forward_s": forward,
        "backward_s": backward,
        "optimizer_s": optimizer,
        "peak_bytes": peak,
    }


def main() -> None:
    """Prints a table; with ``--save`` also writes the figures of each round."""
    parser = timing.make_parser(__doc__)
    parser.add_argument("--size", choices=("small", "medium"), default="medium")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=25)
    options = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in CANDIDATES}
    for _ in range(options.rounds):
        for name, found in rounds.items():
            found.append(measure(name, options.size, options.steps, compiled=options.compile))
            gc.collect()
    figures = {
        name: {column: statistics.median(each[column] for each in found) for column in COLUMNS}
        for name, found in rounds.items()
    }
    kind = "compiled training step" if options.compile else "training step"
    timing.show(f"{kind} of gpt {options.size}", figures, COLUMNS)
    saved = {"figures": figures, "rounds": rounds}
    name = "gpu_step-compiled" if options.compile else "gpu_step"
    timing.save(options.save, name, saved, device="cuda", threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
