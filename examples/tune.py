"""Which ops have to stay in fp32: a small language model with rotary positions and norms by hand.

    python examples/tune.py [--by module] [--tolerance 0.005] [--to DIRECTORY]

It is trained for a moment, so that its numbers have real ranges, then tuned; DIRECTORY gets the lists.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hmpx

WIDTH, HEADS, TOKENS, VOCABULARY = 64, 4, 512, 64


def rotated(x: Tensor) -> Tensor:
    """Returns queries or keys turned by their positions.

    Args:
        x: [batch, heads, tokens, width].
    """
    width = x.shape[-1] // 2
    frequencies = 10_000 ** -(torch.arange(width) / width)
    positions = torch.arange(x.shape[-2]).float()
    angles = positions[:, None] * frequencies  # [tokens, width]
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Norm(nn.Module):
    """Divides by the root of the mean square."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Block(nn.Module):
    """Attention, then a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (
            part.view(batch, tokens, HEADS, -1).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        return x + self.down(F.silu(self.up(self.norm(x))))


class Model(nn.Module):
    """Predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def text(seed: int) -> Tensor:
    """Returns tokens [2, TOKENS] in which each depends on the one ten before."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (2, TOKENS), generator=generator)
    for i in range(10, TOKENS):
        tokens[:, i] = (tokens[:, i - 10] + 1) % VOCABULARY
    return tokens


def trained(steps: int = 30) -> Model:
    """Returns the model after some steps."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        tokens = text(step)
        loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def main() -> None:
    """Trains, tunes, and prints what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--by", choices=("op", "module"), default="op")
    parser.add_argument("--tolerance", type=float, default=0.02)
    parser.add_argument("--to", metavar="DIRECTORY")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = trained()
    batches = [text(1_000), text(1_001), text(1_002)]  # the last one is for the check at the end
    best = hmpx.tune(model, batches, tolerance=options.tolerance, by=options.by)
    print(best)
    if options.to:
        for path in best.write(options.to):
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
