"""Twelve models of different kinds, each with a loss, to count the calls of."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

#: Runs one forward, and returns what to differentiate.
Program = Callable[[], Tensor]


def _sequential(*layers: nn.Module, shape: tuple[int, ...]) -> Program:
    model, x = nn.Sequential(*layers), torch.randn(shape)
    return lambda: model(x).square().mean()


def perceptron() -> Program:
    """Linear layers, dropout and GELU."""
    return _sequential(
        nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8), shape=(4, 16)
    )


def convolutions() -> Program:
    """Convolutions with batch norm, pooling and a classifier."""
    return _sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 4, 3),
        nn.Flatten(),
        nn.Linear(4 * 25, 5),
        shape=(2, 3, 16, 16),
    )


def transposed() -> Program:
    """A decoder of images."""
    return _sequential(
        nn.ConvTranspose2d(4, 8, 2, stride=2),
        nn.GroupNorm(2, 8),
        nn.SiLU(),
        nn.Conv2d(8, 3, 1),
        shape=(2, 4, 5, 5),
    )


def signals() -> Program:
    """Convolutions of one dimension, instance norm, softplus."""
    return _sequential(
        nn.Conv1d(2, 6, 3),
        nn.InstanceNorm1d(6),
        nn.Softplus(),
        nn.Conv1d(6, 1, 3),
        shape=(3, 2, 20),
    )


def volumes() -> Program:
    """A convolution of three dimensions."""
    return _sequential(
        nn.Conv3d(1, 4, 3), nn.Tanh(), nn.AdaptiveAvgPool3d(1), shape=(2, 1, 6, 6, 6)
    )


def embeddings() -> Program:
    """Token embeddings, mean over tokens, cross entropy."""
    embedding, head = nn.Embedding(20, 8), nn.Linear(8, 20)
    tokens, labels = torch.randint(0, 20, (4, 6)), torch.randint(0, 20, (4,))
    return lambda: F.cross_entropy(head(embedding(tokens).mean(1)), labels)


def attention() -> Program:
    """Attention by hand: matmul, softmax, division and addition."""
    project, x = nn.Linear(8, 24), torch.randn(2, 5, 8)

    def run() -> Tensor:
        q, k, v = project(x).chunk(3, -1)
        weights = torch.softmax(q @ k.transpose(-2, -1) / 8**0.5, -1)
        return (weights @ v + x).sum()

    return run


def einsums() -> Program:
    """Einsum, bmm, baddbmm and outer products."""
    a, b = torch.randn(3, 4, 5, requires_grad=True), torch.randn(3, 5, 6, requires_grad=True)
    c = torch.randn(3, 4, 6)
    return lambda: (torch.bmm(a, b) + torch.baddbmm(c, a, b)).exp().mean().log()


def own_casts() -> Program:
    """A model that casts, too: a norm in fp32, a head in its input's type."""
    first, head, x = nn.Linear(8, 8), nn.Linear(8, 4), torch.randn(3, 8)

    def run() -> Tensor:
        h = first(x).float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
        return head(h.to(torch.bfloat16)).float().sum()

    return run


def tied() -> Program:
    """A weight that is used twice."""
    weight = nn.Parameter(torch.randn(6, 6))
    x = torch.randn(2, 6)
    return lambda: F.linear(F.relu(F.linear(x, weight)), weight).sum()


def checkpointed() -> Program:
    """A block that is computed again in the backward."""
    block = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    head, x = nn.Linear(8, 2), torch.randn(3, 8, requires_grad=True)

    def run() -> Tensor:
        with set_checkpoint_early_stop(False):  # it ends by an exception amid a call
            return head(checkpoint(block, x, use_reentrant=False)).sum()

    return run


def residual() -> Program:
    """Residual blocks with in-place activations."""
    a, b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
    norm, x = nn.BatchNorm2d(4), torch.randn(2, 4, 6, 6)

    def run() -> Tensor:
        h = F.relu(norm(a(x)), inplace=True)
        h = h + x
        return F.leaky_relu(b(h)).mean()

    return run


MODELS: dict[str, Callable[[], Program]] = {
    each.__name__: each
    for each in (
        perceptron,
        convolutions,
        transposed,
        signals,
        volumes,
        embeddings,
        attention,
        einsums,
        own_casts,
        tied,
        checkpointed,
        residual,
    )
}
