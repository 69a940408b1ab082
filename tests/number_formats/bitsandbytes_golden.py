"""What bitsandbytes makes of numbers in 4 bits: ``python -m tests.number_formats.bitsandbytes_golden`` writes it.

The tests need the file only: bitsandbytes is large, and 0.50.2 made it, on a CPU.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

GOLDEN = Path(__file__).with_suffix(".json")

#: Values that share a scale.
BLOCK = 64


def inputs() -> dict[str, Tensor]:
    """Returns kinds of numbers, made of integers by exact arithmetic: the same everywhere."""
    random = np.random.default_rng(0)
    bell = random.integers(-(2**20), 2**20, (8, 2**20)).sum(0).astype(np.float32)
    scales = np.ldexp(np.float32(1), random.integers(-100, 100, 2**20 // BLOCK)).astype(np.float32)
    grid = np.arange(-(2**19), 2**19).astype(np.float32)
    grid[::BLOCK] = 2.0**19
    return {
        "bell": torch.from_numpy(bell),
        "scaled": torch.from_numpy((bell.reshape(-1, BLOCK) * scales[:, None]).reshape(-1)),
        "grid": torch.from_numpy(grid),
        "zeros": torch.zeros(2 * BLOCK),
        "ends": torch.from_numpy(bell[: 10 * BLOCK])
        * torch.tensor([1e-38, 1e30]).repeat(5 * BLOCK),
    }


def on_threshold(x: Tensor, code: list[float]) -> Tensor:
    """Returns which quotients of values and largest magnitudes are halfway between codes, in float32.

    bitsandbytes takes the lower code for them; exact arithmetic, the nearer one.
    """
    values = np.unique(np.array(code, np.float32).astype(np.float64))
    halfway = torch.from_numpy(((values[1:] + values[:-1]) / 2).astype(np.float32))
    blocks = x.view(-1, BLOCK)
    amax = blocks.abs().amax(1, keepdim=True)
    return torch.isin(blocks / amax.clamp(min=2.0**-126), halfway).view(-1)


def digest(x: Tensor) -> str:
    """Returns what equal bits have in common."""
    return hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest()


def made() -> dict[str, Any]:
    """Returns what bitsandbytes makes of the numbers."""
    bitsandbytes = importlib.import_module("bitsandbytes")
    functional = importlib.import_module("bitsandbytes.functional")
    found: dict[str, Any] = {"bitsandbytes": bitsandbytes.__version__}
    for kind in ("nf4", "fp4"):
        code = functional.get_4bit_type(kind, device="cpu")
        found[kind] = {"code": code.tolist()}
        for name, x in inputs().items():
            left_out = on_threshold(x, code.tolist())
            packed, state = functional.quantize_4bit(
                x, blocksize=BLOCK, quant_type=kind, compress_statistics=False
            )
            values = functional.dequantize_4bit(packed, state).view(-1)
            codes = torch.stack([packed.view(-1) >> 4, packed.view(-1) & 15], 1).view(-1)
            found[kind][name] = {
                "codes": digest(codes.masked_fill(left_out, 0)),
                "absmax": digest(state.absmax),
                "values": digest(values.masked_fill(left_out, 0.0) + 0.0),  # -0 is 0
                "left_out": int(left_out.sum()),
                "first": values[:8].tolist(),
            }
    return found


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(made()).replace("}, ", "},\n ") + "\n", "utf-8")
