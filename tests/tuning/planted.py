"""Models with a planted fault: a few ops that low precision spoils, and many that it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 16


class Faulty(nn.Module):
    """Two layers, the fault between them, and two more."""

    def __init__(self, fault: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fault = fault
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.first(x))
        h = torch.tanh(self.second(h))
        h = self.fault(h)
        return self.third(torch.sigmoid(h)).relu()


class Block(nn.Module):
    """A residual layer, which may have the fault."""

    def __init__(self, fault: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        self.fault = fault
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.linear(x))
        if self.fault is not None:
            h = self.fault(h)
        return torch.maximum(x, h)


def stack(fault: Callable[[Tensor], Tensor], at: int, count: int = 8) -> nn.Sequential:
    """Returns layers of which one has the fault."""
    return nn.Sequential(*[Block(fault if i == at else None) for i in range(count)])


@dataclass(frozen=True)
class Planted:
    """A model and what has to be kept in fp32 for it.

    Attributes:
        make: Makes the model.
        expected: The set.
        low: The low-precision type.
        by: Whether ops or modules are searched.
        tolerance: Between the error with the fault, and without.
    """

    make: Callable[[], nn.Module]
    expected: frozenset[str]
    low: torch.dtype = torch.bfloat16
    by: str = "op"
    tolerance: float = 0.02


def _op(fault: Callable[[Tensor], Tensor], expected: str, **options: object) -> Planted:
    return Planted(lambda: Faulty(fault), frozenset(expected.split()), **options)  # type: ignore[arg-type]


def _layer(fault: Callable[[Tensor], Tensor], at: int, expected: str, **options: object) -> Planted:
    names = frozenset(f"{at}:{op}" for op in expected.split())
    return Planted(lambda: stack(fault, at), names, by="module", **options)  # type: ignore[arg-type]


def normalized(h: Tensor) -> Tensor:
    x = 3000 * h
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))


def variance(h: Tensor) -> Tensor:
    x = h + 100
    return h * 20 * (x.pow(2).mean(-1, keepdim=True) - x.mean(-1, keepdim=True).pow(2))


def rotated(h: Tensor) -> Tensor:
    angles = torch.arange(16.0) * 61.7
    table = torch.sin(angles)
    return h * table


def softmax(h: Tensor) -> Tensor:
    x = torch.exp(h + 12)
    return x / x.sum(-1, keepdim=True)


def differences(h: Tensor) -> Tensor:
    sums = torch.cumsum(h + 40, -1)
    return torch.diff(sums, dim=-1, prepend=h[:, :1]) - 40


def root(h: Tensor) -> Tensor:
    return torch.sqrt(torch.square(500 + h)) - 500


FP16: dict[str, object] = {"low": torch.float16, "tolerance": 0.01}

FAULTS = {
    "cancellation": _op(lambda h: (h + 256) - 256, "add sub"),
    "cancellation in fp16": _op(lambda h: (h + 2048) - 2048, "add sub", **FP16),
    "cancellation by negation": _op(lambda h: -(300 - h) + 300, "rsub neg add"),
    "scaled out of range": _op(lambda h: (h * 1e6) / 1e6, "mul truediv", **FP16),
    "softmax by hand": _op(softmax, "exp sum truediv", **FP16),
    "logsumexp by hand": _op(
        lambda h: torch.log(torch.exp(h.abs() + 12).sum(-1, keepdim=True)) - 12 + h,
        "exp sum log",
        **FP16,
    ),
    "squares and a root": _op(root, "radd square sqrt sub", **FP16),
    "norm by hand": _op(normalized, "pow mean rsqrt", **FP16),
    "lost below the range": _op(lambda h: (h * 1e-9) / 1e-9, "mul truediv", **FP16),
    "differences of sums": _op(differences, "add cumsum diff sub"),
    "positions": _op(rotated, "mul sin"),
    "variance as a difference": _op(variance, "add pow mean sub"),
    "log of nearly one": _op(lambda h: torch.log(1 + h * 1e-3) / 1e-3, "radd log"),
    "one minus cosine": _op(lambda h: (1 - torch.cos(h * 0.02)) * 5000, "cos rsub"),
    "layer norm far from zero": _op(lambda h: F.layer_norm(h + 500, (WIDTH,)), "add layer_norm"),
    "a product of sums": _op(lambda h: (h + 50) * (h - 50) + 2500, "add sub mul"),
    "a sum out of range": _op(
        lambda h: h + 1e5 / torch.exp(h.abs() + 9).sum(-1, keepdim=True), "rtruediv sum", **FP16
    ),
    "exp and log": _op(lambda h: torch.log(torch.exp(h * 30)) / 30, "exp log", **FP16),
    "product far from zero": _op(
        lambda h: torch.matmul(h + 200, torch.eye(WIDTH) - 1 / WIDTH), "add matmul"
    ),
    "two faults": _op(lambda h: torch.log(1 + ((h + 256) - 256) * 1e-3) / 1e-3, "add sub radd log"),
    "layer 3 cancels": _layer(lambda h: (h + 256) - 256, 3, "add sub"),
    "layer 0 overflows": _layer(lambda h: (h * 1e6) / 1e6, 0, "mul truediv", **FP16),
    "layer 7 takes a root": _layer(root, 7, "radd square sqrt sub", **FP16),
    "layer 5 takes a logarithm": _layer(lambda h: torch.log(1 + h * 1e-3) / 1e-3, 5, "radd log"),
}


def inputs() -> Tensor:
    """Returns a batch."""
    return torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(7))
