"""What a wrapper adds to one call of torch's function, and what names of modules add to a module's.

    python benchmarks/calls.py [--save] [--rounds N] [--against CHECKOUT]

Calls on tiny tensors are spelled as users write them. Bursts of them take turns, with and without a
conversion, and are timed by the thread's CPU time; a low quantile of the bursts counts, so that the figures
hold on a machine that does other things as well. ``--against`` has the wrappers of another checkout take
turns with these, in a process of their own. No op is legalized.

raw       torch's function; for calls that cast, on inputs that are cast by hand, by the cheapest method
adds      microseconds that hmpx takes on top of that
adds there    the same in the other checkout
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import timing
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hmpx

BURSTS = 30  # of a turn

#: Of the bursts, slowest last, this part is as fast as the one that counts.
QUANTILE = 0.05

SECTIONS = {"lists": "hmpx", "sections": [{"module": "layers.3", "fp32": ["linear"]}]}


class Case(NamedTuple):
    """Two spellings of one call.

    Attributes:
        call: As users write it.
        by_hand: With its inputs cast by hand; None where there is nothing to cast.
        calls: How many module calls or op calls it takes for one.
        policy: That of the conversion; None for the default.
    """

    call: str
    by_hand: str | None = None
    calls: int = 1
    policy: dict[str, Any] | None = None


#: x, w and b are fp32, w and b parameters; xh, wh, bh are bf16; w1 is a norm's fp32 weight.
CASES = {
    "linear": Case("F.linear(xh, wh, bh)"),
    "linear, no bias": Case("F.linear(xh, wh)"),
    "matmul": Case("torch.matmul(xh, wh)"),
    "softmax": Case("torch.softmax(x, -1)"),
    "softmax, dim=": Case("torch.softmax(x, dim=-1)"),
    "layer_norm": Case("torch.layer_norm(xh, (2,), bh, bh)"),
    "layer_norm, all arguments": Case("torch.layer_norm(xh, (2,), bh, bh, 1e-5, True)"),
    "layer_norm, fp32 weights": Case("torch.layer_norm(xh, (2,), w1, w1, 1e-5, True)"),
    "attention, is_causal=": Case("F.scaled_dot_product_attention(q, q, q, is_causal=True)"),
    "linear, casting 3": Case("F.linear(x, w, b)", "F.linear(low(x), low(w), low(b))"),
    "linear, casting 2": Case("F.linear(xh, w, b)", "F.linear(xh, low(w), low(b))"),
    "linear, no bias, casting": Case("F.linear(xh, w)", "F.linear(xh, low(w))"),
    "matmul, casting 2": Case("torch.matmul(x, w)", "torch.matmul(low(x), low(w))"),
    "softmax, casting": Case("torch.softmax(xh, -1)", "torch.softmax(full(xh), -1)"),
    "layer_norm, casting": Case(
        "torch.layer_norm(x, (2,), w1, w1)", "torch.layer_norm(low(x), (2,), w1, w1)"
    ),
    "module": Case("identities(xh)", calls=20, policy=SECTIONS),
    "module with one linear": Case("linears(xh)", calls=20, policy=SECTIONS),
}


class Layers(nn.Module):
    """Twenty modules, one after another."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([make() for _ in range(20)])
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def named_values() -> dict[str, Any]:
    """Returns what the spellings name."""
    torch.manual_seed(0)
    x, w, b = torch.randn(2, 2), nn.Parameter(torch.randn(2, 2)), nn.Parameter(torch.randn(2))
    return {
        "torch": torch,
        "F": F,
        "low": Tensor.bfloat16,
        "full": Tensor.float,
        "x": x,
        "w": w,
        "b": b,
        "w1": torch.ones(2),
        "xh": x.bfloat16(),
        "wh": w.detach().bfloat16(),
        "bh": b.detach().bfloat16(),
        "q": torch.randn(1, 1, 2, 2).bfloat16(),
        "identities": Layers(nn.Identity),
        "linears": Layers(lambda: nn.Linear(2, 2, dtype=torch.bfloat16)),
    }


def burst(spelled: str, values: dict[str, Any]) -> Callable[[int], None]:
    """Returns a function that makes so many calls."""
    lines = ["def run(count):", "    for _ in range(count):", f"        {spelled}"]
    exec("\n".join(lines), values)
    return values.pop("run")  # type: ignore[no-any-return]


def durations_us(case: Case, values: dict[str, Any]) -> dict[str, list[float]]:
    """Returns the microseconds of a call in each burst of a turn, unconverted and converted."""
    count = max(1, 100 // case.calls)
    plain, converted = burst(case.by_hand or case.call, values), burst(case.call, values)

    def measure(run: Callable[[int], None]) -> list[float]:
        run(count)
        found = []
        for _ in range(BURSTS):
            start = time.thread_time_ns()
            run(count)
            found.append((time.thread_time_ns() - start) / count / case.calls / 1e3)
        return found

    gc.collect()
    gc.disable()
    raw = measure(plain)
    options = {} if case.policy is None else {"policy": case.policy}
    with hmpx.convert(legalize="never", **options):
        now = measure(converted)
    gc.enable()
    return {"raw": raw, "hmpx": now}


def serve() -> None:
    """Measures each case whose name comes by standard input."""
    torch.set_num_threads(1)
    values = named_values()
    for line in sys.stdin:
        print(json.dumps(durations_us(CASES[line.strip()], values)), flush=True)


class Checkout:
    """A process that measures the hmpx of one checkout."""

    def __init__(self, folder: Path | None) -> None:
        """Starts the process: with the hmpx of ``folder``, or with that which this process has."""
        environment = dict(os.environ)
        if folder is not None:
            environment["PYTHONPATH"] = os.fspath(folder.resolve())
        self._process = subprocess.Popen(
            [sys.executable, os.fspath(Path(__file__).resolve()), "--serve"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._found: dict[tuple[str, str], list[float]] = {}

    def take_turn(self, case: str) -> None:
        """Measures ``case`` once."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f"{case}\n")
        stdin.flush()
        for name, times in json.loads(stdout.readline()).items():
            self._found.setdefault((case, name), []).extend(times)

    def time_us(self, case: str, name: str) -> float:
        """Returns the quantile of all turns."""
        times = sorted(self._found[case, name])
        return times[int(len(times) * QUANTILE)]

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


def main() -> None:
    """Prints the table; with ``--save`` also writes the figures."""
    parser = timing.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="turns of each case")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another one of hmpx")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    names = ["adds"] if options.against is None else ["adds", "adds there"]
    checkouts = [Checkout(None), Checkout(options.against)][: len(names)]
    print(f"microseconds of a call\n{'':28}{'raw':>8}" + "".join(f"{n:>12}" for n in names))
    figures: dict[str, dict[str, float]] = {}
    for case in CASES:
        for number in range(options.rounds):
            for checkout in checkouts if number % 2 else reversed(checkouts):
                checkout.take_turn(case)
        raw = [each.time_us(case, "raw") for each in checkouts]
        figures[case] = {"raw": min(raw)}
        for name, checkout, own in zip(names, checkouts, raw, strict=True):
            figures[case][name] = checkout.time_us(case, "hmpx") - own
        cells = "".join(f"{figures[case][name]:12.2f}" for name in names)
        print(f"{case:28}{figures[case]['raw']:8.2f}{cells}", flush=True)
    for checkout in checkouts:
        checkout.close()
    timing.save(options.save, "calls", {"calls_us": figures}, device="cpu", threads=1)


if __name__ == "__main__":
    main()
