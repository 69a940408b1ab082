import logging
import warnings
from typing import Any

import lightning.pytorch as lightning
import torch
import transformers
from accelerate import Accelerator

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

QUIET: dict[str, Any] = {
    "max_steps": 1,
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Two sequences."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(6) + index
        return {"input_ids": tokens, "labels": tokens}


class Module(lightning.LightningModule):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


data: Any = Tokens()
model = transformers.GPT2LMHeadModel(
    transformers.GPT2Config(n_embd=16, n_head=2, n_layer=1, vocab_size=100)
)
args = transformers.TrainingArguments(
    output_dir="trained", max_steps=1, report_to=[], use_cpu=True, save_strategy="no"
)
module = Module()


class Fitting(lightning.Trainer):
    """Takes one step, of data of its own."""

    def fit(self, model: Any, data: object) -> None:  # type: ignore[override]
        super().fit(model, torch.utils.data.DataLoader(torch.ones(2, 4)))


def Trainer(*given: Any, plugins: Any = None, **more: Any) -> Any:  # noqa: N802
    """Returns the Trainer of Hugging Face, or of Lightning where it gets plugins."""
    if plugins is None:
        return transformers.Trainer(*given, **more)
    return Fitting(plugins=plugins, **QUIET)


def train(accelerator: Accelerator) -> None:
    """Takes one step."""
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer, optimizer = accelerator.prepare(layer, optimizer)
    accelerator.backward(layer(torch.ones(2, 4)).square().mean())
    optimizer.step()
