"""Small tasks to train to the end: a model, its data, its loss, and a score on data that it has not seen.

They are plain fp32 programs. The data come with Python and scikit-learn or are made here, from a fixed
seed. This module knows nothing of casting or of the clock.
"""

from __future__ import annotations

import math
import pydoc_data.topics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol

import cartpole
import models
import networks
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Training(Protocol):
    """A model and what it learns from."""

    model: nn.Module

    def batch(self, step: int) -> tuple[Tensor, ...]:
        """Returns the batch that `loss` gets in a step; called without gradients."""

    def loss(self, *batch: Tensor) -> Tensor:
        """Returns the loss of a batch."""

    def score(self) -> tuple[float, float]:
        """Returns the loss and the metric, on data that are not trained on."""


@dataclass(frozen=True)
class Data:
    """Examples and their labels: some to train on, some to score."""

    inputs: Tensor
    labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor


@dataclass(frozen=True)
class Classifier:
    """Predicts the label of each example, or of each of its tokens.

    Attributes:
        model: Returns logits [..., classes] of inputs.
        data: On the model's device.
        rows: The examples of each step [steps, batch].
        noise: How much noise is added to the inputs.
    """

    model: nn.Module
    data: Data
    rows: Tensor
    noise: float = 0.0

    def batch(self, step: int) -> tuple[Tensor, ...]:
        rows = self.rows[step]
        inputs = self.data.inputs[rows]
        if self.noise:
            inputs = inputs + self.noise * torch.randn_like(inputs)
        return inputs, self.data.labels[rows]

    def loss(self, *batch: Tensor) -> Tensor:
        inputs, labels = batch
        return models.loss(self.model(inputs), labels)

    def score(self) -> tuple[float, float]:
        """Returns the loss and the share of labels that are predicted right."""
        logits, labels = self.model(self.data.test_inputs), self.data.test_labels
        hits = (logits.argmax(-1) == labels).double().mean()
        return models.loss(logits, labels).item(), hits.item()


@dataclass(frozen=True)
class Denoiser:
    """Predicts the noise in images, and so makes images of noise.

    Attributes:
        model: Returns the noise in images [batch, 1, height, width] at times [batch] from 0 to 1.
        data: Images; the labels are not used.
        rows: The images of each step [steps, batch].
        samples: The steps that sampling takes.
    """

    model: nn.Module
    data: Data
    rows: Tensor
    samples: int = 20

    def batch(self, step: int) -> tuple[Tensor, ...]:
        images = self.data.inputs[self.rows[step]]
        times = torch.rand(len(images), device=images.device)
        return noisy(images, times, torch.randn_like(images))

    def loss(self, *batch: Tensor) -> Tensor:
        images, times, noise = batch
        return F.mse_loss(self.model(images, times).float(), noise)

    def score(self) -> tuple[float, float]:
        """Returns the loss, and the energy distance of sampled images to those that are held out."""
        images = self.data.test_inputs
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(2, *images.shape, generator=generator).to(images.device)
        times = torch.linspace(0, 1, len(images), device=images.device)
        loss = self.loss(*noisy(images, times, noise[0])).item()
        return loss, energy_distance(self.sampled(noise[1]), images)

    def sampled(self, x: Tensor) -> Tensor:
        """Returns images made of noise: DDIM without noise of its own."""
        for step in range(self.samples, 0, -1):
            now, then = (0.98 * at / self.samples for at in (step, step - 1))
            noise = self.model(x, torch.full((len(x),), now, device=x.device))
            image = (x - math.sin(now * math.pi / 2) * noise) / math.cos(now * math.pi / 2)
            x = math.cos(then * math.pi / 2) * image.clamp(-1, 1)
            x = x + math.sin(then * math.pi / 2) * noise
        return x


def noisy(images: Tensor, times: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
    """Returns images in noise, at times from 0 (no noise) to 1 (nothing else); times; the noise."""
    angles = (times * (math.pi / 2)).view(-1, 1, 1, 1)
    return images * angles.cos() + noise * angles.sin(), times, noise


def energy_distance(a: Tensor, b: Tensor) -> float:
    """Returns 2 E|x - y| - E|x - x'| - E|y - y'|, 0 for equal distributions; in float64."""
    a, b = a.flatten(1).double(), b.flatten(1).double()
    return (
        2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()
    ).item()


def _split(inputs: Tensor, labels: Tensor, test: int, device: str) -> Data:
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    parts = (inputs[order[test:]], labels[order[test:]], inputs[order[:test]], labels[order[:test]])
    return Data(*(part.to(device) for part in parts))


@cache
def text(device: str) -> Data:
    """Returns windows of 65 characters of Python's documentation: 64, and those that follow them."""
    data = "\n".join(pydoc_data.topics.topics.values()).encode("ascii", "replace")
    rows = torch.tensor(list(data[: len(data) // 65 * 65])).view(-1, 65)
    return _split(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), 512, device)


@cache
def digits(device: str, size: int = 8) -> Data:
    """Returns scikit-learn's handwritten digits, from -1 to 1; images: [rows, 1, size, size]."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images / 8 - 1, dtype=torch.float32).unsqueeze(1)
    if size != 8:
        images = F.interpolate(images, (size, size), mode="bilinear")
    return _split(images, torch.tensor(found.target), 500, device)


@cache
def tumours(device: str) -> Data:
    """Returns scikit-learn's measurements of tumours: 30 columns of mean 0 and deviation 1."""
    from sklearn.datasets import load_breast_cancer

    found = load_breast_cancer()
    columns = torch.tensor(found.data, dtype=torch.float32)
    columns = (columns - columns.mean(0)) / columns.std(0)
    return _split(columns, torch.tensor(found.target), 190, device)


@cache
def graph(
    device: str, nodes: int = 2000, classes: int = 5, features: int = 32
) -> tuple[Tensor, Tensor, Data]:
    """Returns a stochastic block model: features, edges, and nodes with their blocks.

    A node has about 8 edges into its own block and 8 into the others; its features say little.
    """
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(classes, (nodes,), generator=generator)
    is_same = blocks[:, None] == blocks
    chance = torch.where(is_same, 8 * classes / nodes, 8 / nodes / (1 - 1 / classes))
    upper = (torch.rand(nodes, nodes, generator=generator) < chance).triu(1)
    edges = (upper | upper.T).nonzero().T.contiguous()
    means = 0.15 * torch.randn(classes, features, generator=generator)
    values = means[blocks] + torch.randn(nodes, features, generator=generator) * 0.5
    return values.to(device), edges.to(device), _split(torch.arange(nodes), blocks, 1000, device)


@cache
def tones(device: str, count: int = 6000, frames: int = 32, frame: int = 16) -> Data:
    """Returns noisy sounds of eight kinds; [rows, frames, frame]."""
    generator = torch.Generator().manual_seed(0)

    def draw(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, 1, generator=generator)

    time = torch.linspace(0, 1, frames * frame)
    pitch, start, rate = draw(40, 80), draw(0, 2 * math.pi), draw(3, 6)
    phase, slow = 2 * math.pi * pitch * time + start, 2 * math.pi * rate * time
    sounds = torch.stack(
        [
            phase.sin(),  # a tone
            (phase + 50 * time**2).sin(),  # one that rises
            (phase - 50 * time**2).sin(),  # one that falls
            (phase + 4 * slow.sin()).sin(),  # vibrato
            phase.sin() * (1 + slow.sin()),  # tremolo
            (phase.sin() + (1.5 * phase).sin()) / 1.4,  # two tones
            phase.sin() * (slow.sin() > 0) * 1.4,  # pulses
            phase.sin().sign(),  # a square wave
        ]
    )
    kinds = torch.randint(len(sounds), (count,), generator=generator)
    noisy = sounds[kinds, torch.arange(count)] * draw(0.5, 1.5)
    noisy = noisy + 0.5 * torch.randn(noisy.shape, generator=generator)
    return _split(noisy.view(count, frames, frame), kinds, 1000, device)


def _classifier(
    model: Callable[[], nn.Module],
    data: Callable[[str], Data],
    batch: int,
    device: str,
    steps: int,
    *,
    noise: float = 0.0,
) -> Classifier:
    found = data(device)
    rows = torch.randint(len(found.inputs), (steps, batch)).to(device)
    return Classifier(model().to(device), found, rows, noise)


def _gnn(device: str, steps: int) -> Classifier:
    features, edges, nodes = graph(device)
    rows = torch.randint(len(nodes.inputs), (steps, 512)).to(device)
    return Classifier(networks.GNN(features, edges, 5).to(device), nodes, rows)


def _denoiser(device: str, steps: int) -> Denoiser:
    found = digits(device)
    rows = torch.randint(len(found.inputs), (steps, 256)).to(device)
    return Denoiser(networks.UNet().to(device), found, rows)


def _gpt() -> nn.Module:
    return models.GPT(models.TextSize(128, 2, 4, tokens=64, batch=32, vocabulary=128))


def _mlp() -> nn.Module:
    layers = (nn.Linear(30, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2))
    return nn.Sequential(*layers)


@dataclass(frozen=True)
class Task:
    """What is trained, and how.

    Attributes:
        start: Starts a training on a device: of this number of steps, with random weights.
        steps: Of the optimizer.
        rate: The highest learning rate.
        metric: The name of the score that `Training.score` returns alongside the loss.
        what: Model and data, in a few words.
    """

    start: Callable[[str, int], Training]
    steps: int
    rate: float
    metric: str
    what: str


TASKS = {
    "gpt": Task(
        partial(_classifier, _gpt, text, 128), 300, 3e-3, "accuracy", "a GPT, text by characters"
    ),
    "cnn": Task(
        partial(_classifier, networks.CNN, partial(digits, size=16), 128, noise=0.3),
        200,
        5e-3,
        "accuracy",
        "convolutions and batch norm, digits in noise",
    ),
    "vit": Task(
        partial(_classifier, networks.ViT, digits, 128, noise=0.3),
        250,
        3e-3,
        "accuracy",
        "a ViT, digits in noise",
    ),
    "gnn": Task(_gnn, 100, 5e-3, "accuracy", "graph convolutions, nodes of a block model"),
    "lstm": Task(
        partial(_classifier, partial(networks.LSTM, 16, 8), tones, 128),
        300,
        1e-2,
        "accuracy",
        "an LSTM, sounds in noise",
    ),
    "mlp": Task(
        partial(_classifier, _mlp, tumours, 128),
        100,
        3e-3,
        "accuracy",
        "a perceptron, measurements of tumours",
    ),
    "diffusion": Task(_denoiser, 300, 3e-3, "energy distance", "a UNet that draws digits"),
    "ppo": Task(cartpole.PPO.start, 320, 3e-3, "return", "PPO, a pole on a cart"),
}
