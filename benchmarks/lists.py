"""What the shipped lists do to values: a Llama of random weights, and arithmetic that is no model's.

    python benchmarks/lists.py --save

Errors are relative to the same in float32: the norm of the difference over the norm. ``same_token`` is
the share of positions at which the most likely token is that of float32.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from typing import Any

import timing
import torch
import transformers
from torch import Tensor, nn

import hmpx

LENGTHS = (128, 1024, 1500)
SETS = ("hmp", "hmpx", "autocast-cpu", "autocast-cuda")
CANDIDATES: dict[str, Callable[[], Any]] = {
    "fp32": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    **{name: lambda name=name: hmpx.convert(lists=name, device_types={"cpu"}) for name in SETS},
}


def make_llama() -> nn.Module:
    """Returns a model with rotary embeddings, from a fixed seed."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=max(LENGTHS),
        initializer_range=0.1,  # as trained ones, it attends to some places more than to others
    )
    return transformers.LlamaForCausalLM(config).eval()


def timestep_embedding(steps: Tensor, dim: int = 320) -> Tensor:
    """Returns sines and cosines of ``steps`` at ``dim / 2`` frequencies, as diffusion models take."""
    half = dim // 2
    frequencies = torch.exp(-math.log(10000) * torch.arange(half).float() / half)
    angles = steps[:, None].float() * frequencies[None]
    return torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)


def explained_variance(predicted: Tensor, target: Tensor) -> Tensor:
    """Returns 1 - Var(target - predicted) / Var(target), from running sums as metrics keep them."""
    difference = target - predicted
    n = target.numel()
    numerator = (difference * difference).sum() / n - (difference.sum() / n) ** 2
    denominator = (target * target).sum() / n - (target.sum() / n) ** 2
    return 1 - numerator / denominator


def arithmetic() -> dict[str, Tensor]:
    """Returns what surrounds a model: positions, a metric, a data set's scaling."""
    torch.manual_seed(0)
    target = torch.randn(4096) + 30
    return {
        "timestep_embedding": timestep_embedding(torch.arange(0, 1000, 20)),
        "explained_variance": explained_variance(target + 0.1 * torch.randn(4096), target),
        "scaled_data": torch.arange(1000, 1100) * torch.tensor(1.0) - 1000,
    }


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Returns the norm of the difference over the norm of ``expected``."""
    difference = actual.double() - expected.double()
    return float(difference.norm() / expected.double().norm())


def measure() -> dict[str, dict[str, float]]:
    """Returns candidate -> figure -> value."""
    model = make_llama()
    tokens = torch.randint(512, (1, max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    values: dict[str, dict[str, Tensor]] = {}
    for name, region in CANDIDATES.items():
        with region(), torch.no_grad():
            logits = {str(n): copy.deepcopy(model)(tokens[:, :n]).logits for n in LENGTHS}
            values[name] = {**logits, **arithmetic()}
    expected = values["fp32"]
    figures: dict[str, dict[str, float]] = {}
    for name, found in values.items():
        figures[name] = {key: relative_error(value, expected[key]) for key, value in found.items()}
        same = found["1024"].argmax(-1) == expected["1024"].argmax(-1)
        figures[name]["same_token"] = float(same.double().mean())
    return figures


def main() -> None:
    """Prints the table; with ``--save`` also writes it."""
    parser = timing.make_parser(__doc__)
    options = parser.parse_args()
    figures = measure()
    width = max(map(len, figures["fp32"]))
    print(" " * width + "".join(f"{name:>15}" for name in figures))
    for key in figures["fp32"]:
        print(f"{key:{width}}" + "".join(f"{row[key]:15.2g}" for row in figures.values()))
    threads = torch.get_num_threads()
    timing.save(options.save, "lists", {"figures": figures}, device="cpu", threads=threads)


if __name__ == "__main__":
    main()
