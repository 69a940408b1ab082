"""Trains a small convolutional network in a loop of Hugging Face Accelerate, in fp32 and with hmpx.

    python examples/accelerate_loop.py
    torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py

``mixed_precision="no"`` keeps ``torch.autocast`` out of it. Every process that torchrun or ``accelerate
launch`` starts converts for itself, for the accelerator's device; ``save_state`` saves the policy, too.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hmpx.integrations.accelerate import convert

SIZE, CLASSES = 8, 3


def pictures() -> TensorDataset:
    """Returns noise, brighter at the left, in the middle or at the right; x: [n, 1, size, size]."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(CLASSES, (128,), generator=generator)
    x = 0.5 * torch.randn(128, 1, SIZE, SIZE, generator=generator)
    for picture, label in zip(x, y, strict=True):
        picture[:, :, 3 * label : 3 * label + 2] += 1
    return TensorDataset(x, y)


def build() -> nn.Sequential:
    """Returns the network, with the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * (SIZE // 2) ** 2, CLASSES),
    )


def train(
    accelerator: Accelerator, epochs: int
) -> tuple[list[float], Counter[torch.dtype], set[torch.dtype]]:
    """Returns each epoch's mean loss, the dtypes that layers ran in, and those of what is kept."""
    network = build()
    ran: Counter[torch.dtype] = Counter()

    def count(layer: nn.Module, inputs: Any, output: Tensor) -> None:
        ran[output.dtype] += 1

    for layer in network:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_hook(count)
    model, optimizer, data = accelerator.prepare(
        network,
        torch.optim.AdamW(network.parameters(), lr=3e-3),
        DataLoader(pictures(), batch_size=16),
    )
    losses = []
    for _ in range(epochs):
        seen: list[Tensor] = []
        for x, y in data:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            seen.append(accelerator.gather(loss.detach()).mean())
        losses.append(torch.stack(seen).mean().item())
    state = [tensor for s in optimizer.state.values() for tensor in s.values()]
    kept = {t.dtype for t in [*network.state_dict().values(), *state] if t.is_floating_point()}
    accelerator.free_memory()
    return losses, ran, kept


def main() -> None:
    """Prints the losses of both runs, what the layers ran in, and what is kept."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    accelerator = Accelerator(mixed_precision="no", cpu=not torch.cuda.is_available())
    fp32_losses, fp32_ran, _ = train(accelerator, options.epochs)
    with convert(accelerator):
        hmpx_losses, hmpx_ran, kept = train(accelerator, options.epochs)

    accelerator.print("epoch    fp32    hmpx")
    for epoch, (fp32, mixed) in enumerate(zip(fp32_losses, hmpx_losses, strict=True), start=1):
        accelerator.print(f"{epoch:5}  {fp32:6.4f}  {mixed:6.4f}")
    for run, ran in {"fp32": fp32_ran, "hmpx": hmpx_ran}.items():
        counts = ", ".join(f"{n} in {dtype}" for dtype, n in ran.items())
        accelerator.print(f"convolution and linear layer, {run}: {counts}")
    accelerator.print(f"parameters and optimizer state: {', '.join(map(str, kept))}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
