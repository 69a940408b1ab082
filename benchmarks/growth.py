"""How the time of each tool grows with a model's blocks, a program's call sites and a policy's rules.

    python benchmarks/growth.py [--save] [--largest 240] [--only TOOL ...]

Prints for each tool and axis the exponent: the slope of the least-squares line through the processor
times at four sizes, both on a logarithmic scale. 1 is linear. The time of the same program without the
tool is taken away first. Rules are sections by module, as many as
blocks.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable
from typing import Any

import timing
import torch
from torch import Tensor, nn

import hmpx

X = torch.ones(2, 4)


class Block(nn.Module):
    """A residual block of three calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Sites(nn.Module):
    """As many calls, each on a line of its own."""

    def __init__(self, sites: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        lines = ["    x = torch.sigmoid(x)", "    x = x * 2.0"] * (sites // 2)
        names: dict[str, Any] = {"torch": torch}
        exec("\n".join(["def run(x):", *lines, "    return x"]), names)
        self.run = names["run"]

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.linear(x))


def blocks(size: int) -> nn.Module:
    """Returns a model of ``size`` blocks."""
    return nn.Sequential(*[Block() for _ in range(size)])


def trained(model: nn.Module) -> None:
    """Runs one step."""
    model(X).sum().backward()


def recorded(model: nn.Module) -> None:
    """Records one step."""
    with hmpx.record() as seen:
        trained(model)
    seen.report()


TOOLS: dict[str, Callable[[nn.Module], object]] = {
    "record": recorded,
    "freeze": lambda model: hmpx.freeze(model.eval(), X).undo(),
    "draw": lambda model: hmpx.draw(model, X, max_nodes=10**7).dot,
    "compare": lambda model: hmpx.compare(model, X, loss_fn=torch.sum),
    "plan": lambda model: str(hmpx.plan(lambda: model, lambda: (X,), device="cpu")),
}
ALONE = ("compare", "plan")  # they convert by themselves


def seconds(function: Callable[[], object]) -> float:
    """Returns the processor time of one call, without collections of garbage."""
    gc.collect()
    gc.disable()
    start = time.process_time()
    function()
    found = time.process_time() - start
    gc.enable()
    return found


def with_rules(size: int) -> float:
    """Returns the time to convert and to run a step of ``size`` blocks with as many sections."""
    model = blocks(size)
    trained(model)
    sections = [{"module": f"{n}.lin*", "fp32": ["linear"]} for n in range(size)]

    def step() -> None:
        with hmpx.convert(device_types={"cpu"}, policy={"sections": sections}):
            trained(model)

    return seconds(step) - seconds(lambda: trained(model))


def exponent(times: dict[int, float]) -> float:
    """Returns the slope of the least-squares line, on logarithmic scales."""
    xs, ys = [math.log(n) for n in times], [math.log(max(t, 1e-4)) for t in times.values()]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    products = sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True))
    return products / sum((a - x) ** 2 for a in xs)


def measured(tool: str, make: Callable[[int], nn.Module], sizes: list[int]) -> dict[int, float]:
    """Returns size -> the tool's own time."""
    found = {}
    for size in [4, *sizes]:  # the first one imports
        model = make(size)
        with contextlib.nullcontext() if tool in ALONE else hmpx.convert(device_types={"cpu"}):
            trained(model)
            plain = seconds(lambda m=model: trained(m))
            found[size] = seconds(lambda m=model: TOOLS[tool](m)) - plain
    del found[4]
    return found


def main() -> None:
    """Prints the table; with ``--save`` also writes the figures."""
    parser = timing.make_parser(__doc__)
    parser.add_argument("--largest", type=int, default=240, help="number of blocks, and of rules")
    parser.add_argument("--only", nargs="*", default=[*TOOLS, "sections"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = [options.largest // part for part in (8, 4, 2, 1)]
    figures: dict[str, dict[str, float]] = {}
    for tool in options.only:
        axes = {"rules": {n: with_rules(n) for n in sizes}} if tool == "sections" else {}
        if tool in TOOLS:
            axes["blocks"] = measured(tool, blocks, sizes)
            axes["sites"] = measured(tool, Sites, [4 * size for size in sizes])
        for axis, times in axes.items():
            figures.setdefault(tool, {})[axis] = exponent(times)
            shown = "  ".join(f"{n}: {found:.2f} s" for n, found in times.items())
            print(f"{tool:10} {axis:8} {exponent(times):5.2f}   {shown}", flush=True)
    timing.save(options.save, "growth", {"figures": figures}, device="cpu", threads=1)


if __name__ == "__main__":
    main()
