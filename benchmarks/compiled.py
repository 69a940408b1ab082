"""What hmpx costs under torch.compile: a tiny GPT, eager and compiled, against casts by hand.

    python benchmarks/compiled.py [--save] [--rounds N]
    python benchmarks/compiled.py --compile-time float8_e4m3fn nvfp4 [--rounds N] [--backend NAME]

Everything runs in one process. `convert` and `revert` make torch.compile trace anew, so the two
sides take turns in rounds, in alternating order: compile (from the disk cache after the first
round), compare, time. A round's figure is the fastest of its samples; shown are the medians over
the rounds, of the figures and of their ratios. Candidates:

by hand            the model with its casts written out, torch unconverted
hmpx               the fp32 model, converted; no op is legalized, as none is by hand
by hand, compiled  the same two through ``torch.compile(fullgraph=True)`` with inductor
hmpx, compiled

Both sides must give bit-equal results, the loss and in a training step each gradient; and
torch.compile must trace both to the same graphs, forward and backward.

`--compile-time` measures something else: the seconds of processors, compilers' included, that the first
training step takes in fp32 and under each format, in turns, each in a new process without caches.
"""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import overhead
import timing
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import hmpx

Step = Callable[[], Tensor]

CALLS = 10  # in a sample

#: Candidate -> what it is divided by.
RATIOS = {
    "hmpx": "by hand",
    "hmpx, compiled": "by hand, compiled",
    "by hand, compiled": "by hand",
}


@dataclass(frozen=True)
class Side:
    """A model and the ways to run it."""

    model: nn.Module
    is_converted: bool
    loss: Step
    candidates: dict[str, Step]

    def conversion(self) -> contextlib.AbstractContextManager[Any]:
        return hmpx.convert(legalize="never") if self.is_converted else contextlib.nullcontext()


def make_sides(*, training: bool, backend: str = "inductor") -> tuple[Side, Side]:
    """Returns the casts by hand and hmpx, with equal weights and inputs."""
    torch.manual_seed(0)
    plain, hand = overhead.TinyGPT(), overhead.TinyGPT(casts=True)
    hand.load_state_dict(plain.state_dict())
    tokens = torch.randint(0, 32, (1, 4))

    def side(model: nn.Module, name: str) -> Side:
        def loss() -> Tensor:
            return F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())

        def step(function: Step) -> Step:
            def train() -> Tensor:
                model.zero_grad(set_to_none=True)
                result = function()
                result.backward()
                return result.detach()

            return train if training else torch.no_grad()(function)

        compiled = torch.compile(loss, fullgraph=True, backend=backend)
        candidates = {name: step(loss), f"{name}, compiled": step(compiled)}
        return Side(model, name == "hmpx", loss, candidates)

    return side(hand, "by hand"), side(plain, "hmpx")


def results(side: Side, name: str) -> list[Tensor]:
    """Returns the loss, and the gradients where the step computes them."""
    loss = side.candidates[name]()
    return [loss, *(p.grad for p in side.model.parameters() if p.grad is not None)]


def measure(
    rounds: int, samples: int, *, training: bool, backend: str
) -> dict[str, dict[str, float]]:
    """Returns the medians in microseconds, and of the ratios.

    Raises:
        SystemExit: hmpx and the casts by hand differ in a bit.
    """
    sides = make_sides(training=training, backend=backend)
    figures = []
    for number in range(rounds):
        found: dict[str, list[Tensor]] = {}
        figures.append(figure := {})
        for side in sides if number % 2 else sides[::-1]:
            with side.conversion():
                found |= {name: results(side, name) for name in side.candidates}
                figure |= timing.fastest(side.candidates, CALLS, samples)
        check_equal(found["by hand"], found["hmpx"], "eager")
        check_equal(found["by hand, compiled"], found["hmpx, compiled"], "compiled")
    return {
        "us": {
            name: statistics.median(figure[name] for figure in figures)
            for side in sides
            for name in side.candidates
        },
        "ratios": {
            f"{name} / {base}": statistics.median(f[name] / f[base] for f in figures)
            for name, base in RATIOS.items()
        },
    }


def check_equal(expected: list[Tensor], actual: list[Tensor], what: str) -> None:
    """Ends the program unless all tensors are equal, bit for bit."""
    for number, (a, b) in enumerate(zip(expected, actual, strict=True)):
        if a.dtype is not b.dtype or not torch.equal(a, b):
            raise SystemExit(f"{what}: result {number} differs by {(a - b).abs().max().item()}")


def compare_graphs() -> dict[str, dict[str, int]]:
    """Returns how many nodes and casts the graphs of a training step have.

    Raises:
        SystemExit: The graphs of hmpx and of the casts by hand are not the same.
    """
    sources, counts = [], {}
    for side in make_sides(training=True):
        graphs: list[torch.fx.GraphModule] = []

        def keep(
            graph: torch.fx.GraphModule, _: object, graphs: list[torch.fx.GraphModule] = graphs
        ) -> Callable[..., Any]:
            graphs.append(graph)
            return make_boxed_func(graph.forward)

        backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
        with side.conversion():
            torch.compile(side.loss, fullgraph=True, backend=backend)().backward()
        sources.append([graph.code for graph in graphs])
        counts = {
            direction: {
                "nodes": len(graph.graph.nodes),
                "casts": sum(
                    n.target is torch.ops.aten._to_copy.default for n in graph.graph.nodes
                ),
            }
            for direction, graph in zip(("forward", "backward"), graphs, strict=True)
        }
    if sources[0] != sources[1]:
        raise SystemExit("hmpx and the casts by hand give torch.compile different graphs")
    return counts


class FirstStep:
    """A training step that has not been compiled yet, in a process of its own."""

    def __init__(self, name: str, backend: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = self._folder.name
        os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        torch.manual_seed(0)
        self._model, self._tokens = overhead.TinyGPT(), torch.randint(0, 32, (1, 4))
        self._compiled = torch.compile(self._loss, backend=backend)
        torch.compile(torch.sin, backend=backend)(torch.ones(3))  # imports
        self._conversion: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if name != "fp32":
            hmpx.formats.quantize(torch.ones(3), name)  # builds the kernels
            self._conversion = hmpx.convert(low_precision_type=name)

    def _loss(self) -> Tensor:
        logits = self._model(self._tokens).float()
        return F.cross_entropy(logits.flatten(0, 1), self._tokens.flatten())

    def seconds(self) -> float:
        """Returns those of processors that the first step took."""
        with self._conversion:
            start = _used_seconds()
            self._compiled().backward()
            return _used_seconds() - start


def _used_seconds() -> float:
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, whose))


def compile_seconds(formats: list[str], rounds: int, backend: str) -> dict[str, float]:
    """Returns the fewest seconds of the first step in fp32 and under each format."""
    best: dict[str, float] = {}
    for _ in range(rounds):
        for name in ("fp32", *formats):
            with timing.workers([name], FirstStep, backend, threads=1) as workers:
                seconds = workers[name].call("seconds")
            best[name] = min(best.get(name, seconds), seconds)
            print(f"  {name:36}{seconds:6.1f} s{seconds / best['fp32']:8.2f}", flush=True)
    return best


def main() -> None:
    """Prints the tables; with ``--save`` also writes the figures."""
    parser = timing.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--samples", type=int, default=40, help="of each candidate in a round")
    parser.add_argument("--backend", default="inductor", help="torch.compile's")
    parser.add_argument("--compile-time", nargs="+", metavar="FORMAT", help="and nothing else")
    options = parser.parse_args()
    if options.compile_time:
        best = compile_seconds(options.compile_time, options.rounds, options.backend)
        for name, seconds in best.items():
            print(f"{name:38}{seconds:6.1f} s{seconds / best['fp32']:8.2f}")
        return
    torch.set_num_threads(1)
    graphs = compare_graphs()
    print(f"graphs of hmpx and by hand are equal: {graphs}")
    models = {}
    for name, training in (("forward", False), ("training step", True)):
        found = models[name] = measure(
            options.rounds, options.samples, training=training, backend=options.backend
        )
        print(f"\ntiny GPT {name}, results bit-equal in {options.rounds} rounds")
        for candidate, us in found["us"].items():
            print(f"  {candidate:36}{us:6.0f} us")
        for pair, ratio in found["ratios"].items():
            print(f"  {pair:36}{ratio:6.2f}")
    figures = {
        "rounds": options.rounds,
        "bit_equal": True,  # or `check_equal` would have ended the program
        "equal_graphs": graphs,
        "models_us": {name: found["us"] for name, found in models.items()},
        "ratios": {name: found["ratios"] for name, found in models.items()},
    }
    timing.save(options.save, "compiled", figures, device="cpu", threads=1)


if __name__ == "__main__":
    main()
