"""The ways to run a model that are counted beside each other, and the counts of each."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import hmpx

from . import models
from .steps import Kernel, Step, autocast, kernels_of, summary


def _nothing(step: Step) -> None:
    """Leaves a model as it is."""


def cast_by_hand(step: Step) -> None:
    """Has a model's products and convolutions cast, as one does who writes the casts."""
    for module in step.model.modules():
        if isinstance(module, (nn.Linear, Conv1D, nn.Conv2d)):
            module.forward = types.MethodType(_low_forward, module)


def _low_forward(module: nn.Linear | Conv1D | nn.Conv2d, x: Tensor) -> Tensor:
    low = torch.bfloat16
    x, weight = x.to(low), module.weight.to(low)
    bias = None if module.bias is None else module.bias.to(low)
    if isinstance(module, nn.Linear):
        return F.linear(x, weight, bias)
    if isinstance(module, nn.Conv2d):
        return F.conv2d(x, weight, bias, module.stride, module.padding)
    assert bias is not None
    shape = (*x.shape[:-1], module.nf)
    return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight).view(shape)


def freeze(step: Step) -> None:
    """Stores a model's weights in the type in which they are used."""
    hmpx.freeze(step.model, step.inputs, keep_fp32=False)


@dataclass(frozen=True)
class Candidate:
    """What is done to an fp32 program.

    Attributes:
        options: What `hmpx.convert` is given; None leaves torch as it is.
        region: Makes the context of the forward.
        prepare: What is done to the model before.
        is_training: Whether a step has a backward.
    """

    options: dict[str, Any] | None = None
    region: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    prepare: Callable[[Step], None] = _nothing
    is_training: bool = True


TRAINING = {
    "fp32": Candidate(),
    "autocast": Candidate(region=autocast),
    "casts by hand": Candidate(prepare=cast_by_hand),
    "hmpx": Candidate({}),
    "hmpx autocast-cuda": Candidate({"lists": "autocast-cuda"}),
    "hmpx O2": Candidate({"opt_level": "O2"}),
    "hmpx products": Candidate({"policy": {"lists": "none", "low": ["linear", "conv2d", "addmm"]}}),
}
INFERENCE = {
    "inference, fp32": Candidate(is_training=False),
    "inference, autocast": Candidate(region=autocast, is_training=False),
    "inference, hmpx": Candidate({}, is_training=False),
    "inference, hmpx frozen": Candidate({}, prepare=freeze, is_training=False),
}
CANDIDATES = TRAINING | INFERENCE


def kernels(model: str, candidate: str, device_type: str = "cuda") -> list[Kernel]:
    """Returns the kernels of a model's step."""
    chosen = CANDIDATES[candidate]
    with contextlib.ExitStack() as stack:
        if chosen.options is not None:
            stack.enter_context(hmpx.convert(**chosen.options, device_types={device_type}))
        return kernels_of(
            functools.partial(models.make, model),
            region=chosen.region,
            device_type=device_type,
            is_training=chosen.is_training,
            prepare=chosen.prepare,
        )


def figures(name: str) -> dict[str, dict[str, int]]:
    """Returns candidate -> `summary` of a model."""
    return {candidate: summary(kernels(name, candidate)) for candidate in CANDIDATES}


def ops(name: str, candidate: str, device_type: str) -> list[str]:
    """Returns the ops of a model's step with their dtypes, in order."""
    return [str(kernel) for kernel in kernels(name, candidate, device_type)]


def report(name: str) -> dict[str, dict[str, Any]]:
    """Returns candidate -> `summary` of a model, its ops with their dtypes, in order, and their bytes."""
    found = {candidate: kernels(name, candidate) for candidate in CANDIDATES}
    return {
        candidate: {
            **summary(listed),
            "ops": [str(kernel) for kernel in listed],
            "apart": [text for kernel in listed for text in kernel.apart()],
            "bytes_by_op": [kernel.bytes for kernel in listed],
        }
        for candidate, listed in found.items()
    }
