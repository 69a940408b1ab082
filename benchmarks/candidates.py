"""The ways to run one fp32 model that the benchmarks compare: what each does to torch or the model.

Knows nothing of the clock, of memory, or of which models there are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import hmpx

COMPILED = ", compiled"


@dataclass(frozen=True)
class Candidate:
    """What is done once, in a process that runs nothing else.

    Attributes:
        has_region: The forward and the loss run inside torch.autocast.
        is_low: The model and its inputs are bf16.
        legalize: What `hmpx.convert` is given; None leaves torch as it is.
        store: How hmpx stores the weights in bf16; None leaves them alone.
        keep_weight_casts: What `hmpx.convert` is given.
    """

    has_region: bool = False
    is_low: bool = False
    legalize: str | None = None
    store: str | None = None
    keep_weight_casts: bool | str = "auto"


CANDIDATES = {
    "fp32": Candidate(),
    "autocast": Candidate(has_region=True),
    "bf16": Candidate(is_low=True),
    "hmpx": Candidate(legalize="auto"),
    "hmpx fast": Candidate(legalize="fast"),
    "hmpx native, kept": Candidate(legalize="never", keep_weight_casts=True),
    "hmpx native, cast again": Candidate(legalize="never", keep_weight_casts=False),
    "hmpx frozen": Candidate(legalize="auto", store="dtype"),
}

#: What all others are compared with.
BASE = "fp32"


@dataclass(frozen=True)
class Prepared:
    """A candidate that is ready to run.

    Attributes:
        module: Holds the weights.
        model: What to call: the module or its compiled form.
        inputs: What to call it with.
        region: Makes the context that the forward and the loss run in.
    """

    module: nn.Module
    model: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    region: Callable[[], contextlib.AbstractContextManager[Any]]


def convert(name: str, device_type: str) -> None:
    """Converts torch as the candidate ``name`` does, if it does: before the model is built, as programs do."""
    candidate = CANDIDATES[name.removesuffix(COMPILED)]
    if candidate.legalize is not None:
        hmpx.convert(
            legalize=candidate.legalize,
            device_types={device_type},
            keep_weight_casts=candidate.keep_weight_casts,
        )


def prepare(name: str, module: nn.Module, *inputs: Tensor, backend: str = "inductor") -> Prepared:
    """Returns the candidate ``name``; what it does to this process is never undone.

    Args:
        name: A candidate, with `COMPILED` after it or not.
        module: An fp32 model, built after `convert`.
        inputs: What it is called with.
        backend: torch.compile's.
    """
    candidate = CANDIDATES[name.removesuffix(COMPILED)]
    device_type = inputs[0].device.type
    if candidate.store is not None:
        hmpx.freeze(module, inputs, keep_fp32=False, store=candidate.store)
    if candidate.is_low:
        module.bfloat16()
        inputs = tuple(x.bfloat16() if x.is_floating_point() else x for x in inputs)

    def region() -> contextlib.AbstractContextManager[Any]:
        if candidate.has_region:
            return torch.autocast(device_type, torch.bfloat16)
        return contextlib.nullcontext()

    model = torch.compile(module, backend=backend) if name.endswith(COMPILED) else module
    return Prepared(module, model, inputs, region)


def choose(
    chosen: Iterable[str] | None, default: Iterable[str], compiled: Iterable[str]
) -> list[str]:
    """Returns the candidates to run, `BASE` first.

    Args:
        chosen: What the user asked for, if anything.
        default: What runs otherwise.
        compiled: Which of these run compiled, too.
    """
    names = list(chosen or default)
    names = [BASE, *(name for name in names if name != BASE)]
    return names + [name + COMPILED for name in names if name in set(compiled)]


def weight_bytes(module: nn.Module) -> int:
    """Returns the size of all parameters and buffers, shared ones once."""
    storages = [t.untyped_storage() for t in (*module.parameters(), *module.buffers())]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
