"""What the sweep knows of a trained model."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

Batch = Mapping[str, Any]
Outputs = Mapping[str, Any]


@dataclass(frozen=True)
class Task:
    """A trained model and what it is judged by."""

    name: str
    #: The package that brings the weights, as it is imported, and as it is installed.
    module: str
    package: str
    #: One line on model and data.
    about: str
    build: Callable[[], nn.Module]
    #: Returns the inputs of a seed; ``truth`` among them goes to the scores as it is.
    batch: Callable[[int], Batch]
    run: Callable[[nn.Module, Batch], Outputs]
    #: Measure -> its value for outputs, beside those of fp64 (in tuning: of fp32). The first one is tuned for.
    scores: Mapping[str, Callable[[Outputs, Outputs], float]]
    #: Whether the first score is a distance from the exact outputs, in percent.
    is_distance: bool = False

    @property
    def is_installed(self) -> bool:
        """Whether the weights are here."""
        return importlib.util.find_spec(self.module) is not None


class Judged(nn.Module):
    """A task's model, called with a batch."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.model, self._run = task.build(), task.run

    def forward(self, **batch: Any) -> Outputs:
        """Returns the outputs and the truth."""
        return {**self._run(self.model, batch), "truth": batch.get("truth")}


def folder_of(module: str) -> Path:
    """Returns where a package lies, without importing it."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def with_weights(model: nn.Module, path: Path) -> nn.Module:
    """Returns the model with the weights of a file, for inference."""
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return model.eval()
