"""Where the time of a training step goes, legalized and in fp32: by kind of work, on the CPU.

    python benchmarks/profile_step.py [--save] [--models gpt ...] [--sizes small]

A step is that of train.py. Each candidate trains in a process of its own, under torch.profiler; the
processes take turns. A step is the same ops in the same order each time, so each op counts with the
fastest of all profiled steps: what else the machine does then hardly counts.

products     matrix products, convolutions and attention, forward and backward
raising      casts from bf16 to fp32
rounding     casts from fp32 to bf16
layout       copies within one dtype
elementwise  all other ops that compute: norms, activations, softmax, additions, reductions
optimizer    the optimizer's step
allocation   new memory, as far as torch's ops for it take time; pages that the system gives are in
             the kernels that first touch them
python       the processor time of a step without the profiler, less all of these: Python, autograd,
             wrappers, views
rest         products and python together. The profiler tells real time only, and an op of some
             milliseconds never runs through on a machine that is busy: where products seem to take
             longer than they can, only this is known

On a CPU that has bf16, `legalize="auto"` legalizes little. Take its vector instructions away:
ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 in the environment.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from typing import Any

import timing
import train
from torch.profiler import ProfilerActivity, profile

# Before the profiler starts: it says so on stderr, each time. Processes of candidates inherit it.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

CANDIDATES = ("fp32", "hmpx", "hmpx fast")
KINDS = (
    "products", "raising", "rounding", "layout", "elementwise", "optimizer", "allocation", "python", "rest"
)  # fmt: skip
COLUMNS = ("ratio", "step_s", *(f"{kind}_s" for kind in KINDS))

_PRODUCTS = (
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mkldnn_convolution",
    "aten::convolution_backward", "aten::thnn_conv2d", "aten::_slow_conv2d_forward",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
)  # fmt: skip
_ALLOCATION = ("aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty_strided")
_LOW, _FP32 = "c10::BFloat16", "float"

#: Ops that make no kernel run by themselves: their own time is that of the dispatcher.
_VIEWS = (
    "aten::view", "aten::as_strided", "aten::t", "aten::transpose", "aten::reshape", "aten::permute",
    "aten::slice", "aten::select", "aten::expand", "aten::to", "aten::_to_copy", "aten::linear",
    "aten::matmul", "aten::detach", "detach", "aten::unsqueeze", "aten::squeeze", "aten::unbind",
    "aten::narrow", "aten::flatten", "aten::_unsafe_view", "aten::_reshape_alias", "aten::contiguous",
    "aten::clone", "aten::item", "aten::is_nonzero", "aten::layer_norm", "aten::cross_entropy_loss",
    "aten::resolve_conj", "aten::conv2d", "aten::convolution", "aten::_convolution", "aten::conj",
    "aten::scaled_dot_product_attention", "aten::zeros_like", "aten::zeros", "aten::ones_like",
    "aten::result_type", "aten::alias", "aten::view_as", "aten::lift_fresh", "aten::embedding",
)  # fmt: skip


def kind_of(event: Any) -> str:
    """Returns the kind of work that the op of an event does itself."""
    name = event.name
    if name in _PRODUCTS:
        return "products"
    if name in _ALLOCATION:
        return "allocation"
    if name == "aten::copy_":
        target, source = event.input_dtypes[:2]
        if (target, source) == (_FP32, _LOW):
            return "raising"
        return "rounding" if (target, source) == (_LOW, _FP32) else "layout"
    if name.startswith(("Optimizer.step", "aten::_foreach", "aten::_fused")):
        return "optimizer"
    return "elementwise" if name.startswith("aten::") and name not in _VIEWS else "python"


class Profiled(train.Training):
    """A candidate that can be profiled."""

    def fastest(self, steps: int) -> float:
        """Returns the least processor time of a step without the profiler, in seconds."""
        return min(self._timed() for _ in range(steps))

    def _timed(self) -> float:
        start = time.thread_time()
        self.step()
        return time.thread_time() - start

    def profiled(self) -> list[tuple[str, str, float]]:
        """Returns kind, name and own microseconds of each op of a step."""
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
            self.step()
        return [(kind_of(e), e.name, e.self_cpu_time_total) for e in found.events()]


def summed(
    steps: list[list[tuple[str, str, float]]], step_s: float
) -> tuple[dict[str, float | None], dict[str, float]]:
    """Returns the seconds of each kind of work, and of each op, from the ops of several steps."""
    names = [[name for _, name, _ in ops] for ops in steps]
    same = max(names, key=names.count)
    alike = [ops for ops, own in zip(steps, names, strict=True) if own == same]
    seconds_of = dict.fromkeys(KINDS, 0.0)
    by_op: dict[str, float] = defaultdict(float)
    for events in zip(*alike, strict=True):
        kind, name, _ = events[0]
        seconds = min(own for _, _, own in events) / 1e6
        if kind != "python":
            seconds_of[kind] += seconds
            by_op[f"{kind}: {name.removeprefix('aten::')}"] += seconds
    products_s = seconds_of["products"]
    seconds_of["rest"] = step_s - sum(seconds_of.values()) + products_s
    seconds_of["python"] = seconds_of["rest"] - products_s
    kinds: dict[str, float | None] = {**seconds_of}
    if seconds_of["python"] <= 0:
        kinds["products"] = kinds["python"] = None
    return kinds, dict(sorted(by_op.items(), key=lambda each: -each[1])[:12])


def measure(
    model: str, size: str, names: list[str], options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Returns candidate -> figures."""
    with timing.workers(names, Profiled, model, size, options, threads=1) as workers:
        for worker in workers.values():
            worker.call("fastest", 3)
        times: dict[str, list[float]] = {name: [] for name in workers}
        steps: dict[str, list[Any]] = {name: [] for name in workers}
        for turn in range(options.rounds):
            order = list(workers) if turn % 2 == 0 else list(reversed(workers))
            for name in order:
                times[name].append(workers[name].call("fastest", options.steps))
                steps[name].append(workers[name].call("profiled"))
    base = times["fp32"]
    figures: dict[str, dict[str, Any]] = {}
    for name in workers:
        step_s = min(times[name])
        kinds, ops = summed(steps[name], step_s)
        ratios = sorted(own / of_base for own, of_base in zip(times[name], base, strict=True))
        figures[name] = {
            "ratio": ratios[len(ratios) // 2],
            "step_s": step_s,
            **{f"{kind}_s": seconds for kind, seconds in kinds.items()},
            "ops_s": ops,
        }
    return figures


def main() -> None:
    """Prints a table for each model and size; with ``--save`` also writes all figures."""
    parser = timing.make_parser(__doc__)
    timing.add_device_options(parser, train.MODELS, CANDIDATES, "models")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--steps", type=int, default=3, help="timed in a turn, before one is profiled"
    )
    parser.set_defaults(attention="fused", backend="inductor", threads=1)
    options = parser.parse_args()
    names = list(dict.fromkeys(["fp32", *(options.candidates or CANDIDATES)]))
    figures: dict[str, dict[str, dict[str, Any]]] = {}
    for model in options.models:
        for size in options.sizes:
            found = measure(model, size, names, options)
            figures.setdefault(model, {})[size] = found
            timing.show(f"training step of {model} {size}", found, COLUMNS)
            timing.save(
                options.save,
                "profile_step",
                {"figures": figures},
                device=options.device,
                threads=1,
            )


if __name__ == "__main__":
    main()
