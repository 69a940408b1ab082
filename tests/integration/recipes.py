"""A small model and the recipes of low-precision training, which tests and their processes share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hmpx

#: Recipe -> what stands on an op's line.
RECIPES = {
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn_tensor gradients=float8_e5m2_tensor output=bfloat16",
    "fp8 delayed": "float8_e4m3fn_delayed gradients=float8_e5m2_delayed output=bfloat16",
    "fp8 without scales": "float8_e4m3fn gradients=float8_e5m2 output=float32 overflow=saturate",
    "mxfp8": "mxfp8_e4m3 gradients=mxfp8_e4m3 output=float32",
    "nvfp4": "nvfp4 gradients=nvfp4 output=float32",
}
OPS = ("linear", "matmul", "bmm", "conv2d")


class Network(nn.Module):
    """A convolution, attention by products, and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 16, 3, padding=1)
        self.mixed = nn.Linear(16, 48)
        self.head = nn.Linear(16, 4)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.relu(self.convolution(images)).flatten(2).transpose(1, 2)
        q, k, v = self.mixed(hidden).float().chunk(3, -1)
        hidden = hidden + torch.softmax((q @ k.mT).float() / 4, -1) @ v
        return self.head(hidden.float().mean(1)).float()


def policy(recipe: str) -> hmpx.Policy:
    """Returns the policy of a recipe: its products, and nothing else."""
    return hmpx.Policy.from_ops(low=[f"{op} {RECIPES[recipe]}" for op in OPS])


def batch(step: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    """Returns images whose brightness tells their class, and the classes."""
    generator = torch.Generator().manual_seed(2 * step + rank)
    classes = torch.arange(8) % 4
    noise = torch.randn(8, 1, 5, 5, generator=generator) / 2
    return noise + classes.view(-1, 1, 1, 1), classes


def losses(model: nn.Module, steps: int, rank: int = 0) -> list[float]:
    """Trains a model; returns the loss of each step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    found = []
    for step in range(steps):
        images, classes = batch(step, rank)
        loss = F.cross_entropy(model(images), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found
