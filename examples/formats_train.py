"""Trains a small GPT and a small ResNet in fp32, in bf16 both native and emulated, and in e4m3.

    python examples/formats_train.py
    python examples/formats_train.py --model gpt --steps 20 --format mxfp8_e4m3

One epoch each of real data that is there without a download: Python's own reference documentation,
read byte by byte, and scikit-learn's handwritten digits. The models are those of transformers, with
random weights, the same in every run; every run sees the same batches.

Where each op of the low-precision list gives fp32 and is computed as hardware does that multiplies
bf16 and adds up in fp32 (``legalize="always"``), bf16 that torch computes and bf16 as a number format
are one arithmetic: the losses are equal bit for bit.

Float8 e4m3, or another format, trains with gradients in fp32, and with gradients in the format, too.
There the small ones vanish below the format's smallest number unless the loss is scaled (``--loss-scale``).
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, ResNetConfig, ResNetForImageClassification

import hmpx

BATCH, BLOCK = 16, 64  # sequences or images a batch, bytes a sequence
TEXT_BYTES = 100_000
LOSS_SCALE = 256.0

Batch = dict[str, Tensor]


def gpt() -> nn.Module:
    """Returns a GPT-2 of two layers that reads bytes."""
    config = GPT2Config(
        vocab_size=256, n_positions=BLOCK, n_embd=64, n_layer=2, n_head=4,
        bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model


def text() -> Iterator[Batch]:
    """Yields an epoch of excerpts of Python's documentation, shuffled; ids: [batch, block]."""
    data = "\n".join(pydoc_data.topics.topics.values()).encode()[:TEXT_BYTES]
    rows = torch.tensor(list(data[: len(data) // BLOCK * BLOCK])).view(-1, BLOCK)
    for ids in rows[torch.randperm(len(rows))].split(BATCH):
        yield {"input_ids": ids, "labels": ids}


def resnet() -> nn.Module:
    """Returns a ResNet of two stages for images of 8x8 pixels."""
    config = ResNetConfig(
        num_channels=1, embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1],
        layer_type="basic", num_labels=10,
    )  # fmt: skip
    model = ResNetForImageClassification(config)
    model.resnet.embedder.embedder.convolution.stride = (1, 1)
    model.resnet.embedder.pooler = nn.Identity()
    return model


def digits() -> Iterator[Batch]:
    """Yields an epoch of handwritten digits, shuffled; images: [batch, 1, 8, 8]."""
    found = load_digits()
    images = torch.tensor(found.images / 16, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(found.target)
    for rows in torch.randperm(len(labels)).split(BATCH):
        yield {"pixel_values": images[rows], "labels": labels[rows]}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Iterator[Batch]]]] = {
    "gpt": (gpt, text),
    "resnet": (resnet, digits),
}


def losses(name: str, steps: int, loss_scale: float) -> list[float]:
    """Returns the loss of each step of an epoch, which starts from the same weights every time."""
    build, batches = MODELS[name]
    torch.manual_seed(0)
    model = build().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    found = []
    for _, batch in zip(range(steps), batches(), strict=False):
        loss = model(**batch).loss
        optimizer.zero_grad()
        (loss * loss_scale).backward()
        for parameter in model.parameters():
            parameter.grad /= loss_scale
        optimizer.step()
        found.append(loss.item())
    return found


@dataclass
class Way:
    """How a model is trained."""

    context: Callable[[], AbstractContextManager[object]]
    loss_scale: float = 1.0


@dataclass
class Run:
    """The losses of a model trained in one way."""

    losses: list[float]
    elapsed_s: float

    @classmethod
    def of(cls, name: str, steps: int, way: Way) -> Run:
        """Trains the model of that name."""
        start = time.perf_counter()
        with way.context():
            found = losses(name, steps, way.loss_scale)
        return cls(found, time.perf_counter() - start)

    @property
    def last(self) -> float:
        """The mean of the last tenth of the losses."""
        count = max(len(self.losses) // 10, 1)
        return sum(self.losses[-count:]) / count


def in_format(name: str, round_gradients: bool = True) -> hmpx.Session:
    """Converts to the shipped lists with a number format in place of bf16."""
    format = hmpx.formats.get(name)  # "bfloat16" by name alone would be torch's own dtype
    return hmpx.convert(low_precision_type=format, round_gradients=round_gradients)


def in_native_bf16() -> hmpx.Session:
    """Converts to the shipped lists; ops of the low-precision list return fp32, as formats do."""
    ops: dict[hmpx.CastPolicy, list[str]] = {hmpx.ALLOW: [], hmpx.DENY: []}
    for op, decision in hmpx.load_policy().decisions.items():
        ops.setdefault(decision.cast_policy, []).append(op)
    low = [f"{op} output=float32" for op in ops[hmpx.ALLOW]]
    policy = hmpx.Policy.from_ops(low=low, fp32=ops[hmpx.DENY])
    return hmpx.convert(policy=policy, legalize="always")


def ways(format: str, loss_scale: float) -> dict[str, Way]:
    """Returns what to compare, by the name under which it is printed."""
    return {
        "fp32": Way(nullcontext),
        "native bf16": Way(in_native_bf16),
        "emulated bf16": Way(partial(in_format, "bfloat16")),
        format: Way(partial(in_format, format, round_gradients=False)),
        "  gradients too": Way(partial(in_format, format)),
        f"  loss x {loss_scale:g}": Way(partial(in_format, format), loss_scale),
    }


def main() -> None:
    """Trains each model in each way, and prints the losses."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, nargs="+", default=[*MODELS])
    parser.add_argument("--steps", type=int, default=10**6, help="stop before the epoch ends")
    parser.add_argument("--format", default="float8_e4m3fn")
    parser.add_argument("--loss-scale", type=float, default=LOSS_SCALE)
    options = parser.parse_args()
    torch.set_num_threads(1)  # at this size a second thread costs more than it gains
    for name in options.model:
        runs: dict[str, Run] = {}
        for way, how in ways(options.format, options.loss_scale).items():
            run = runs[way] = Run.of(name, options.steps, how)
            if way == "fp32":
                print(f"{name}: {len(run.losses)} steps")
                print("                   first loss  last losses   to fp32      time")
            gap = run.last / runs["fp32"].last - 1
            print(
                f"  {way:16}  {run.losses[0]:10.4f}  {run.last:11.4f}  {gap:+8.2%}"
                f"  {run.elapsed_s:6.1f} s"
            )
        print(f"  bf16 losses, native and emulated: {verdict(runs)}")


def verdict(runs: dict[str, Run]) -> str:
    """Says whether both ways to compute bf16 gave the same losses."""
    pairs = zip(runs["native bf16"].losses, runs["emulated bf16"].losses, strict=True)
    for step, (native, emulated) in enumerate(pairs, start=1):
        if native != emulated:
            return f"differ from step {step} on, {native!r} and {emulated!r}"
    return "equal bit for bit"


if __name__ == "__main__":
    main()
