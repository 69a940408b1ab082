"""Chooses the ops to cast with two list files, and shows what becomes of each op.

    python examples/custom_lists/custom_lists.py

``my_bf16.txt`` starts from a shipped list (``@hmp``), adds an op and removes two (``-mul``);
``my_fp32.txt`` is a list of its own. The session tells what is done with an op and which line says
so. At the end a misspelt name, which ``strict=True`` makes an error; without it hmpx warns and goes
on.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hmpx
from hmpx import CastPolicy

HERE = Path(__file__).resolve().parent
SHOWN = ("linear", "gelu", "layer_norm", "mul", "softmax", "truediv", "div", "add", "exp")


class Gate(nn.Module):
    """Mixes its input's features by weights that a softmax computes from them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Returns every intermediate result by name."""
        normed = self.norm(x)
        hidden = F.gelu(self.up(normed))
        scores = self.down(hidden) / 4.0
        weights = F.softmax(scores, dim=-1)
        return {
            "x": x,
            "normed": normed,
            "hidden": hidden,
            "scores": scores,
            "weights": weights,
            "mixed": weights * x,
        }


def main() -> None:
    """Prints the decisions, the dtypes that they lead to, and an error."""
    torch.manual_seed(0)
    model, x = Gate(), torch.randn(8, 16)

    with hmpx.convert(HERE / "my_bf16.txt", HERE / "my_fp32.txt", device_types={"cpu"}) as session:
        print("op          policy  because of")
        for op in SHOWN:
            decision = session.policy[op]
            reason = decision.reason.replace(f"{HERE}{os.sep}", "")
            print(f"{op:10}  {decision.cast_policy.name:6}  {reason}")
        results = model(x)
    assert session.policy["torch.nn.functional.softmax"].cast_policy is CastPolicy.FP32

    print("\nresult    dtype")
    for name, result in results.items():
        print(f"{name:8}  {str(result.dtype).removeprefix('torch.')}")

    with tempfile.TemporaryDirectory() as directory:
        misspelt = Path(directory) / "misspelt.txt"
        misspelt.write_text("linear\nsofmax\n", encoding="utf-8")
        try:
            hmpx.convert(bf16_file_path=misspelt, strict=True)
        except hmpx.OpListError as error:
            print(f"\n{type(error).__name__}: {error}")
    print(f"torch is {'converted' if hmpx.is_converted() else 'as it was'}")


if __name__ == "__main__":
    main()
