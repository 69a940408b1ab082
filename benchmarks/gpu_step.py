"""A training step on a GPU: its time, how long the GPU works, kernels, Python's time, memory.

    python benchmarks/gpu_step.py [--model lstm] [--mode graphed] [--candidates autocast hmpx] [--save]

All candidates share a process and take turns, so that one machine measures them. A step is zero_grad, forward,
loss, backward and AdamW's step. Where the GPU works for less than a step takes, it waits for Python.

fp32              the program as it is
autocast          forward and loss inside torch.autocast(bfloat16)
casts by hand     a GPT whose linear layers cast their inputs and weights; losses and norms are left alone
hmpx              after hmpx.convert()
hmpx, cast again  after hmpx.convert(keep_weight_casts=False)

``--mode`` is ``eager``, ``compiled`` (torch.compile) or ``graphed``: a whole step is captured as a CUDA graph and
replayed. ``HMPX_NODES=off`` before the command measures hmpx without its compiled nodes. A table at the end compares
the backwards under torch.autocast and hmpx. ``--device cpu`` tries the program out, and counts no kernels.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import models
import timing
import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

import hmpx
from hmpx import compute

CANDIDATES: dict[str, Mapping[str, Any] | None] = {
    "fp32": None,
    "autocast": None,
    "casts by hand": None,
    "hmpx": {},
    "hmpx, cast again": {"keep_weight_casts": False},
}
MODES = ("eager", "compiled", "graphed")
COLUMNS = ("step_s", "gpu_s", "kernels", "forward_s", "backward_s", "optimizer_s", "peak_bytes")
PHASES = ("forward", "backward", "optimizer")
WARM_UP = 4

#: Rows of the table of the backward.
MOST_ROWS = 24


class Sequence(nn.Module):
    """Layers of an LSTM and a head, whose step is mostly cuDNN's."""

    def __init__(self, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


def lstm(size: str, device: str) -> tuple[nn.Module, models.Batch]:
    """Returns an LSTM, and a batch for it."""
    width, layers, tokens, rows = (1024, 4, 256, 64) if size == "medium" else (64, 2, 16, 4)
    inputs = torch.randn(rows, tokens, width, device=device)
    labels = torch.randint(width, (rows, tokens), device=device)
    return Sequence(width, layers, width).to(device), models.Batch(inputs, labels)


def cast_by_hand(layer: nn.Linear, x: Tensor) -> Tensor:
    """Returns a linear layer's output from inputs and weights cast to bfloat16."""
    bias = None if layer.bias is None else layer.bias.bfloat16()
    return nn.functional.linear(x.bfloat16(), layer.weight.bfloat16(), bias)


def training(
    name: str, model_name: str, size: str, device: str, *, mode: str
) -> Callable[[], list[float]]:
    """Returns a step of a candidate: it returns Python's seconds at its beginning and after each phase."""
    if model_name == "lstm":
        model, batch = lstm(size, device)
    else:
        model, batch = (make("gpt", size, device=device) for make in (models.build, models.batch))
    if name == "casts by hand":
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.forward = functools.partial(cast_by_hand, layer)  # type: ignore[method-assign]
    if mode == "compiled":
        torch.compiler.reset()
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=mode == "graphed")
    is_peer = name == "autocast"

    def step() -> list[float]:
        times = [time.perf_counter()]
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16) if is_peer else contextlib.nullcontext():
            loss = models.loss(model(batch.inputs), batch.labels)
        times.append(time.perf_counter())
        with record_function("backward"):
            loss.backward()
        times.append(time.perf_counter())
        optimizer.step()
        return [*times, time.perf_counter()]

    return step


def captured(step: Callable[[], list[float]]) -> Callable[[], list[float]]:
    """Returns what replays a step as one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay() -> list[float]:
        times = [time.perf_counter()]
        graph.replay()
        return times + [time.perf_counter()] * len(PHASES)

    return replay


def on_device(events: Iterable[Any]) -> list[Any]:
    """Returns a profile's events on the device, without those of the host that started them."""
    return [event for event in events if event.device_type == DeviceType.CUDA]


def backward_of(events: Iterable[Any]) -> dict[str, float]:
    """Returns seconds by kernel on the device, and by autograd's node on the host, the whole backward first."""
    found: dict[str, float] = {}
    for event in events:
        if event.device_type == DeviceType.CUDA:
            found[f"gpu: {event.key}"] = event.self_device_time_total / 1e6
        elif event.key == "backward" or event.key.startswith("autograd::engine"):
            node = event.key.rpartition(": ")[2]
            found[f"host: {node}"] = event.cpu_time_total / 1e6
    return found


def measure(
    name: str, model: str, size: str, device: str, steps: int, *, mode: str
) -> dict[str, Any]:
    """Returns the figures of a candidate, and those of its backward."""
    options = CANDIDATES[name]
    has_gpu = device == "cuda"
    wait = torch.cuda.synchronize if has_gpu else time.perf_counter
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_gpu else [])]
    with contextlib.nullcontext() if options is None else hmpx.convert(**options):
        step = training(name, model, size, device, mode=mode)
        if mode == "graphed":
            step = captured(step)
        for _ in range(WARM_UP):
            step()
        wait()
        if has_gpu:
            torch.cuda.reset_peak_memory_stats()
        seconds, phases = [], []
        for _ in range(steps):
            times = step()
            wait()
            seconds.append(time.perf_counter() - times[0])
            phases.append([end - begin for begin, end in itertools.pairwise(times)])
        peak = torch.cuda.max_memory_allocated() if has_gpu else 0
        with profile(activities=activities[-1:]) as kernels:
            step()
            wait()
        with profile(activities=activities) as whole:
            step()
            wait()
    events = on_device(kernels.key_averages())
    in_phases = dict(zip(PHASES, map(statistics.median, zip(*phases, strict=True)), strict=True))
    return {
        "step_s": statistics.median(seconds),
        "gpu_s": sum(event.self_device_time_total for event in events) / 1e6,
        "kernels": sum(event.count for event in events),
        **{f"{phase}_s": found for phase, found in in_phases.items()},
        "peak_bytes": peak,
        "backward": backward_of(whole.key_averages()),
    }


def backwards(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns where the backwards of torch.autocast and hmpx differ most, in seconds."""
    peer, ours = (figures[name]["backward"] for name in ("autocast", "hmpx"))
    rows = {
        key: {"autocast_s": peer.get(key, 0.0), "hmpx_s": ours.get(key, 0.0)}
        for key in {*peer, *ours}
    }
    order = sorted(rows, key=lambda key: -abs(rows[key]["hmpx_s"] - rows[key]["autocast_s"]))
    return {key[:60]: rows[key] for key in order[:MOST_ROWS]}


def main() -> None:
    """Prints tables; with ``--save`` also writes the figures of each round."""
    parser = timing.make_parser(__doc__)
    parser.add_argument("--model", choices=("gpt", "lstm"), default="gpt")
    parser.add_argument("--size", choices=("small", "medium"), default="medium")
    parser.add_argument("--mode", choices=MODES, default="eager")
    parser.add_argument("--candidates", nargs="+", choices=CANDIDATES)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=25)
    options = parser.parse_args()
    if options.mode == "graphed" and options.device != "cuda":
        parser.error("--mode graphed needs a CUDA device")
    names = options.candidates or [
        name for name in CANDIDATES if name != "casts by hand" or options.model == "gpt"
    ]
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name, found in rounds.items():
            arguments = (options.model, options.size, options.device, options.steps)
            found.append(measure(name, *arguments, mode=options.mode))
            gc.collect()
    figures: dict[str, dict[str, Any]] = {
        name: {column: statistics.median(each[column] for each in found) for column in COLUMNS}
        | {"backward": found[-1]["backward"]}
        for name, found in rounds.items()
    }
    timing.show(f"{options.mode} training step of {options.model} {options.size}", figures, COLUMNS)
    if {"autocast", "hmpx"} <= figures.keys() and options.mode == "eager":
        timing.show("backward", backwards(figures), ("autocast_s", "hmpx_s"))
    saved = {"figures": figures, "rounds": rounds}
    parts = [
        "gpu_step",
        *([options.model] if options.model != "gpt" else []),
        *([options.mode] if options.mode != "eager" else []),
        *([] if compute.nodes_in_use().module else ["no_nodes"]),
    ]
    timing.save(
        options.save,
        "-".join(parts),
        saved,
        device=options.device,
        threads=torch.get_num_threads(),
    )


if __name__ == "__main__":
    main()
