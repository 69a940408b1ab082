"""Trains a tiny Llama with the Trainer of Hugging Face, in fp32 and with hmpx.

    python examples/hf_trainer.py
    python examples/hf_trainer.py --steps 100

`HmpxCallback` converts torch from the beginning of ``train()`` to its end, and each checkpoint carries the
policy. There is no ``bf16=True`` in the `TrainingArguments`, which would have ``torch.autocast`` cast as
well. Gradient accumulation, gradient checkpointing, evaluation and checkpoints of the Trainer work as
they do in fp32. The weights are random and the data made up, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hmpx.integrations.transformers import HmpxCallback

VOCABULARY, LENGTH = 32, 16


class Sequences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences that count on from a random start, modulo the vocabulary."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = torch.randint(VOCABULARY, (), generator=torch.Generator().manual_seed(index))
        tokens = (start + torch.arange(LENGTH)) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def build() -> LlamaForCausalLM:
    """Returns the model, with the same weights each time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=LENGTH,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def train(
    steps: int, callbacks: list[TrainerCallback]
) -> tuple[list[float], Counter[torch.dtype], set[torch.dtype]]:
    """Returns the losses, the dtypes that linear layers ran in, and those of what is kept."""
    model = build()
    ran: Counter[torch.dtype] = Counter()

    def count(layer: nn.Module, inputs: Any, output: Tensor) -> None:
        ran[output.dtype] += 1

    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(count)
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            max_steps=steps,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(model, arguments, train_dataset=Sequences(), callbacks=callbacks)
        trainer.remove_callback(PrinterCallback)  # the losses are printed below
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    state = [tensor for s in trainer.optimizer.state.values() for tensor in s.values()]
    return losses, ran, {tensor.dtype for tensor in [*model.parameters(), *state]}


def main() -> None:
    """Prints the losses of both runs, what the linear layers ran in, and what is kept."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # at this size a second thread costs more than it gains

    fp32_losses, fp32_ran, _ = train(options.steps, [])
    hmpx_losses, hmpx_ran, kept = train(options.steps, [HmpxCallback()])

    print(" step    fp32    hmpx")
    for step, (fp32, mixed) in enumerate(zip(fp32_losses, hmpx_losses, strict=True), start=1):
        if step in (1, options.steps) or step % max(1, options.steps // 5) == 0:
            print(f"{step:5}  {fp32:6.4f}  {mixed:6.4f}")
    for run, ran in {"fp32": fp32_ran, "hmpx": hmpx_ran}.items():
        print(f"linear layers, {run}: {', '.join(f'{n} in {dtype}' for dtype, n in ran.items())}")
    print(f"parameters and optimizer state: {', '.join(map(str, kept))}")


if __name__ == "__main__":
    main()
