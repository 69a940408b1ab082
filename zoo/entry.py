"""What the sweep knows of a model, whichever library it comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

#: Keyword arguments of a model's forward.
Batch = Mapping[str, Any]


def call(model: nn.Module, batch: Batch) -> Any:
    """Returns the model's outputs."""
    return model(**batch)


@dataclass(frozen=True)
class Entry:
    """One model of the zoo.

    Every function is given the same seeds in every mode, so that it returns the same numbers.
    """

    name: str
    #: The package that the model comes from.
    library: str
    #: What kind of model it is: the sample takes from each in turn.
    family: str
    build: Callable[[], nn.Module]
    #: Returns the arguments of a forward pass that is compared and trained on.
    batch: Callable[[nn.Module], Batch]
    #: Returns the arguments of a forward pass over as many positions as the model has, up to 1,500.
    long_batch: Callable[[nn.Module], Batch] | None = None
    #: Generates greedily, from a batch.
    generate: Callable[[nn.Module, Batch], Tensor] | None = None
    forward: Callable[[nn.Module, Batch], Any] = call
    #: Brings the model into the mode in which it is compared.
    compared_mode: Callable[[nn.Module], Any] = nn.Module.eval


def integers(low: int, high: int, shape: tuple[int, ...]) -> Tensor:
    """Returns random integers, the same ones whatever was drawn before."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(7))


def normal(*shape: int) -> Tensor:
    """Returns normally distributed numbers, the same ones whatever was drawn before."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def uniform(*shape: int) -> Tensor:
    """Returns numbers between 0 and 1, the same ones whatever was drawn before."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(7))
