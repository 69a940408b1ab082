"""Trains a small GPT twice, in fp32 and with hmpx, and shows that the losses agree.

    python examples/train_gpt.py
    python examples/train_gpt.py --steps 200 --bf16 my_bf16.txt --fp32 my_fp32.txt

The text is the reference documentation that comes with Python itself, read character by character.
Both runs start from the same weights and see the same batches. After the losses comes a sample of
the decisions: which op was cast, from what to what, and the line of the op list that says so.

On a CPU without fast bf16 instructions the mixed-precision run takes far longer than the other;
the model is small for that reason.
"""

from __future__ import annotations

import argparse
import functools
import logging
import math
import os
import pydoc_data.topics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hmpx

BATCH, BLOCK = 8, 64  # sequences a batch, characters a sequence
WIDTH, HEADS, LAYERS = 64, 4, 2


class Attention(nn.Module):
    """Causal self-attention, written out, so that its softmax is an op that a list can name."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(WIDTH // HEADS)  # [b, h, s, s]
        future = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1)
        weights = F.softmax(scores.masked_fill(future, -math.inf), dim=-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, s, WIDTH))


class Block(nn.Module):
    """One transformer layer, normalized before each half."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A character-level language model: [batch, block] of indices -> [batch, block, vocabulary]."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, WIDTH)
        self.position = nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(positions))))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Returns the mean cross-entropy, in nats a character, of predicting each next character."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


class Training:
    """One model with its optimizer and its own copy of the sequence of batches."""

    def __init__(self, tokens: Tensor, vocabulary: int, seed: int, device: torch.device) -> None:
        torch.manual_seed(seed)
        self.model = GPT(vocabulary).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.batches = batches(tokens, seed, device)
        self.elapsed_s = 0.0

    def step(self) -> float:
        """Returns the loss of one training step."""
        start = time.perf_counter()
        loss = loss_of(self.model, next(self.batches))
        self.optimizer.zero_grad()
        loss.backward()
        with hmpx.disable_casts():
            self.optimizer.step()
        value = loss.item()
        self.elapsed_s += time.perf_counter() - start
        return value


def batches(tokens: Tensor, seed: int, device: torch.device) -> Iterator[Tensor]:
    """Yields random excerpts of ``tokens``, the same ones for the same ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - BLOCK, (BATCH, 1), generator=generator)
        yield tokens[starts + torch.arange(BLOCK + 1)].to(device)


def text_tokens() -> tuple[Tensor, int]:
    """Returns Python's documentation as character indices, and how many characters there are."""
    text = "\n".join(pydoc_data.topics.topics.values())
    index = {character: i for i, character in enumerate(sorted(set(text)))}
    return torch.tensor([index[character] for character in text]), len(index)


class DecisionLog(logging.Handler):
    """Keeps the first decision that hmpx logs for each op and its input dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, list[str]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Files ``casting  linear(bf16, fp32)  to_bf16  LOW by ...``, leaving out integer calls."""
        message = record.getMessage().replace(f"{Path(__file__).parent}{os.sep}", "")
        _, call, *rest = message.split("  ")
        if not call.endswith("()"):
            self.first.setdefault(call, rest)


def main() -> None:
    """Trains both ways, then prints the losses and a sample of the decisions."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--bf16", default="", metavar="FILE", help="ops to run in bfloat16")
    parser.add_argument("--fp32", default="", metavar="FILE", help="ops to run in float32")
    parser.add_argument("--verbose", action="store_true", help="log every distinct decision")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # at this size a second thread costs more than it gains
    tokens, vocabulary = text_tokens()
    print(f"{len(tokens)} characters, {vocabulary} distinct; {device.type}, seed {options.seed}")

    fp32 = Training(tokens, vocabulary, options.seed, device)
    mixed = Training(tokens, vocabulary, options.seed, device)
    convert = functools.partial(
        hmpx.convert, options.bf16, options.fp32, device_types={device.type}
    )
    print(" step  fp32 loss  hmpx loss  difference")
    fp32_losses = [fp32.step() for _ in range(options.steps)]
    with convert(verbose="once" if options.verbose else False) as session:
        for step, expected in enumerate(fp32_losses, start=1):
            actual = mixed.step()
            if step in (1, options.steps) or step % max(1, options.steps // 10) == 0:
                print(f"{step:5}  {expected:9.4f}  {actual:9.4f}  {actual / expected - 1:+10.2%}")
    print(f"fp32 {fp32.elapsed_s:.1f} s, hmpx {mixed.elapsed_s:.1f} s for {options.steps} steps")

    print("\nThe decisions of one more step:")
    logger, decisions = logging.getLogger("hmpx"), DecisionLog()
    logger.addHandler(decisions)
    logger.propagate = False
    with convert(verbose="once"):
        mixed.step()
    for call, (outcome, reason, *place) in decisions.first.items():
        print(f"  {call:30}  {outcome:8}  {reason:33}  {'  '.join(place)}")
    gelu = session.policy["gelu"]
    print(f"gelu, for one, runs in whatever type comes: {gelu.cast_policy.name}, {gelu.reason}")


if __name__ == "__main__":
    main()
