"""Precision bugs of other projects, rebuilt small: each with and without its fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BF16 = torch.bfloat16


class Bug(NamedTuple):
    """``run(is_fixed)`` runs the program; a contract's lines and a code of `hmpx.lint` find the bug."""

    run: Callable[[bool], object]
    lines: list[dict[str, Any]]
    code: str


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Router(nn.Module):
    """Chooses among experts by logits with large margins."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 32, bias=False)
        self.gate.weight.data = drawn(32, 64) * 2
        self.correction = nn.Parameter(drawn(32, seed=1))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x.to(self.gate.weight.dtype))
        return logits.float().softmax(-1) + self.correction


def transferred_router(is_fixed: bool) -> None:
    """Weights of an fp32 router are sent to the inference engine in bf16."""
    trained, served = Router(), Router()
    dtype = torch.float32 if is_fixed else BF16
    served.load_state_dict({name: each.to(dtype) for name, each in trained.state_dict().items()})
    served(drawn(16, 64, seed=2))


def downcast_on_load(is_fixed: bool) -> None:
    """A loader casts tensors that a checkpoint keeps in fp32, and the model upcasts them again."""
    router = Router()
    if not is_fixed:
        router.correction.data = router.correction.data.to(BF16).float()
    router(drawn(16, 64, seed=2))


def ignored_fp32_module(is_fixed: bool) -> None:
    """A wrapper's mixed precision casts a module that the model wants in fp32."""
    router = Router()
    if not is_fixed:
        router.gate.to(BF16)
    router(drawn(16, 64, seed=2))


class Layer(nn.Module):
    """Adds a small update to the stream."""

    def forward(self, x: Tensor) -> Tensor:
        return x + drawn(*x.shape, seed=3).to(x.dtype) * 2**-10


def low_residual(is_fixed: bool) -> None:
    """The residual stream is fp32 in the configuration, and bf16 in the program."""
    model = nn.Sequential(*[Layer() for _ in range(4)])
    model(drawn(16, 64, seed=2).to(torch.float32 if is_fixed else BF16))


def rotary_tables(is_fixed: bool) -> None:
    """Angles of positions are computed in bf16."""
    dtype = torch.float32 if is_fixed else BF16
    frequencies = (10_000 ** -(torch.arange(0, 64) / 64)).to(dtype)
    angles = torch.arange(4096).to(dtype)[:, None] * frequencies
    angles.float().cos()


def divergence(is_fixed: bool) -> None:
    """The KL divergence of two nearly equal distributions is computed in bf16."""
    dtype = torch.float32 if is_fixed else BF16
    student = drawn(8, 1000).to(dtype)
    teacher = student + (drawn(8, 1000, seed=1) * 1e-3).to(dtype)
    p, q = F.log_softmax(student, -1), F.log_softmax(teacher, -1)
    (p.exp() * (p - q)).sum()


def timesteps(is_fixed: bool) -> None:
    """A diffusion model's timesteps are cast before their embedding is computed."""
    steps = torch.arange(999, 0, -50).to(torch.float32 if is_fixed else BF16)
    (steps[:, None] * drawn(1, 32).to(steps.dtype)).sin()


def late_logits(is_fixed: bool) -> None:
    """Logits are upcast after they were rounded."""
    states, weight = drawn(64, 128).to(BF16), (drawn(500, 128, seed=1) * 3).to(BF16)
    if is_fixed:
        states, weight = states.float(), weight.float()
    logits = F.linear(states, weight.requires_grad_())
    F.cross_entropy(logits.float(), torch.arange(64))


BUGS = [
    Bug(transferred_router, [{"tensor": "gate.weight", "contents": "float32"}], "HP111"),
    Bug(downcast_on_load, [{"tensor": "correction", "contents": "float32"}], "HP111"),
    Bug(ignored_fp32_module, [{"module": "gate", "compute": "float32"}], "HP101"),
    Bug(low_residual, [{"module": "*", "output": "float32"}], "HP104"),
    Bug(rotary_tables, [{"op": "cos", "contents": "float32"}], "HP102"),
    Bug(divergence, [{"op": "log_softmax", "output": "float32"}], "HP103"),
    Bug(timesteps, [{"op": "sin", "compute": "float32"}], "HP102"),
    Bug(late_logits, [{"op": "cross_entropy", "contents": "float32"}], "HP101"),
]
