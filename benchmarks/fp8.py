"""A linear layer in float8: hmpx, emulated and by kernels, beside torchao's float8 training and bfloat16.

    python benchmarks/fp8.py [--device cuda --sizes 1024 4096 --compiled] [--save]

Scales are by tensor, gradients float8_e5m2, results bfloat16. torchao's row needs torchao. On CPUs only the
numbers are of interest, since their kernels are torch's reference.

output, of_input, of_weight   relative L2 error of the output and both gradients, against float64
to_torchao                    largest relative L2 difference of these from torchao's
step                          time of a forward and backward, over bfloat16's in turns
"""

from __future__ import annotations

import contextlib
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import timing
import torch
from torch import Tensor, nn

import hmpx

LINE: Final = "linear float8_e4m3fn_tensor gradients=float8_e5m2_tensor output=bfloat16"
COLUMNS: Final = ("output", "of_input", "of_weight", "to_torchao", "step")
ROUNDS: Final = 7

Tensors = tuple[Tensor, ...]


class Candidate(NamedTuple):
    """A layer's forward and backward, and the conversion that it runs in."""

    step: Callable[[], Tensors]  # the output, and the gradients of input and weight
    block: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


def torchaos(layer: nn.Linear) -> nn.Module | None:
    """Returns a layer in torchao's float8 by tensor; None without torchao."""
    with contextlib.suppress(ImportError):
        from torchao.float8 import convert_to_float8_training

        return convert_to_float8_training(nn.Sequential(copy.deepcopy(layer).bfloat16()))
    return None


def candidates_of(size: int, rows: int, device: str, *, compiled: bool) -> dict[str, Candidate]:
    """Returns each candidate."""
    torch.manual_seed(0)
    layer = nn.Linear(size, size, bias=False, device=device).bfloat16().float()
    x = torch.randn(rows, size, device=device).bfloat16().float()
    gradient = torch.randn(rows, size, device=device).bfloat16().float()

    def step_of(model: nn.Module, dtype: torch.dtype) -> Callable[[], Tensors]:
        given = x.to(dtype, copy=True).requires_grad_()
        run: Any = torch.compile(model, fullgraph=True) if compiled else model
        (weight,) = model.parameters()
        incoming = gradient.to(torch.bfloat16 if dtype is not torch.float64 else dtype)

        def step() -> Tensors:
            given.grad = weight.grad = None
            output = run(given)
            output.backward(incoming)
            return output.detach(), given.grad, weight.grad  # type: ignore[return-value]

        return step

    def converted(hardware: str) -> Candidate:
        policy = {"lists": "none", "low": [LINE]}
        return Candidate(
            step_of(copy.deepcopy(layer), torch.float32),
            lambda: hmpx.convert(policy=policy, device_types={device}, hardware=hardware),
        )

    found = {
        "float64": Candidate(step_of(copy.deepcopy(layer).double(), torch.float64)),
        "bfloat16": Candidate(step_of(copy.deepcopy(layer).bfloat16(), torch.bfloat16)),
        "emulated": converted("never"),
        "kernels": converted("require"),
    }
    if (peer := torchaos(layer)) is not None:
        found["torchao"] = Candidate(step_of(peer, torch.bfloat16))
    return found


def differences(a: Tensors, b: Tensors) -> list[float]:
    """Returns the relative L2 difference of each from b's."""
    return [
        float((one.double() - other.double()).norm() / other.double().norm())
        for one, other in zip(a, b, strict=True)
    ]


def run(candidate: Candidate, device: str) -> tuple[Tensors, float]:
    """Returns what a step computes, and its duration in seconds."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    with candidate.block():
        synchronize()
        began = time.perf_counter()
        found = candidate.step()
        synchronize()
        return found, time.perf_counter() - began


def measure(size: int, rows: int, device: str, *, compiled: bool) -> dict[str, dict[str, float]]:
    """Returns the figures of each candidate."""
    candidates = candidates_of(size, rows, device, compiled=compiled)
    results = {name: run(each, device)[0] for name, each in candidates.items()}  # warms up, too
    exact = results.pop("float64")
    turns: dict[str, list[float]] = {name: [] for name in results}
    for _ in range(ROUNDS):
        for name in results:
            turns[name].append(run(candidates[name], device)[1])
    base = statistics.median(turns["bfloat16"])
    figures = {}
    for name, found in results.items():
        errors = dict(zip(COLUMNS, differences(found, exact), strict=False))
        if "torchao" in results:
            errors["to_torchao"] = max(differences(found, results["torchao"]))
        figures[name] = {**errors, "step": statistics.median(turns[name]) / base}
    return figures


def main() -> None:
    """Prints a table for each size; with ``--save`` also writes all figures."""
    parser = timing.make_parser(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sizes", type=int, nargs="+", default=[256])
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures = {}
    for size in options.sizes:
        found = measure(size, options.rows, options.device, compiled=options.compiled)
        figures[str(size)] = found
        how = "compiled" if options.compiled else "eager"
        timing.show(f"{size} x {size}, {options.rows} rows, {how}", found, COLUMNS)
    name = "fp8_compiled" if options.compiled else "fp8"
    timing.save(
        options.save, name, {"figures": figures}, device=options.device, threads=options.threads
    )


if __name__ == "__main__":
    main()
