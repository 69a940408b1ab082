"""Trains a small network with the Trainer of Lightning, in fp32 and with hmpx.

    python examples/lightning_module.py
    python examples/lightning_module.py --fp16

`HmpxPrecision` converts torch while the Trainer fits; torch.autocast stays out of it. In float16 it
scales the loss as well. Checkpoints carry the policy.

Don't put `hmpx.disable_casts` around the optimizer's step, in ``optimizer_step`` of the module, say:
Lightning runs the forward pass inside it, as the optimizer's closure, so that nothing would be cast
at all. hmpx keeps the optimizer's own arithmetic in fp32 without being asked.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections import Counter
from typing import Any

import lightning.pytorch as lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hmpx.integrations.lightning import HmpxPrecision

FEATURES, CLASSES = 16, 4


class Classifier(lightning.LightningModule):
    """Two layers; notes the loss of each step and the dtypes that its linear layers ran in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 64), nn.GELU(), nn.Linear(64, CLASSES))
        self.losses: list[float] = []
        self.ran: Counter[torch.dtype] = Counter()
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                layer.register_forward_hook(self.count)

    def count(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        self.ran[output.dtype] += 1

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.layers(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def points() -> TensorDataset:
    """Returns points around the center of their class; x: [n, features]."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(CLASSES, FEATURES, generator=generator)
    y = torch.randint(CLASSES, (256,), generator=generator)
    return TensorDataset(centers[y] + torch.randn(256, FEATURES, generator=generator), y)


def train(steps: int, plugins: list[Any]) -> tuple[Classifier, set[torch.dtype]]:
    """Returns the trained module, and the dtypes of its parameters and the optimizer's state."""
    torch.manual_seed(0)
    module = Classifier()
    trainer = lightning.Trainer(
        max_steps=steps,
        devices=1,
        plugins=plugins,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, DataLoader(points(), batch_size=16))
    state = [tensor for s in trainer.optimizers[0].state.values() for tensor in s.values()]
    return module, {tensor.dtype for tensor in [*module.parameters(), *state]}


def main() -> None:
    """Prints the losses of both runs, what the linear layers ran in, and what is kept."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--fp16", action="store_true", help="float16 and loss scaling")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # no hints on hardware
    warnings.filterwarnings("ignore", "The 'train_dataloader' does not have many workers")
    plugin = HmpxPrecision(low_precision_type="float16" if options.fp16 else "bfloat16")

    fp32, _ = train(options.steps, [])
    mixed, kept = train(options.steps, [plugin])

    print(" step    fp32    hmpx")
    for step, losses in enumerate(zip(fp32.losses, mixed.losses, strict=True), start=1):
        if step in (1, options.steps) or step % max(1, options.steps // 5) == 0:
            print(f"{step:5}  {losses[0]:6.4f}  {losses[1]:6.4f}")
    for run, module in {"fp32": fp32, "hmpx": mixed}.items():
        counts = ", ".join(f"{n} in {dtype}" for dtype, n in module.ran.items())
        print(f"linear layers, {run}: {counts}")
    print(f"parameters and optimizer state: {', '.join(map(str, kept))}")
    if options.fp16:
        scale = plugin.scaler.get_scale()
        print(f"loss scale: {scale:.0f} (each step that overflows is skipped and halves it)")


if __name__ == "__main__":
    main()
