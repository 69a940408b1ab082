"""One process of two that train with DDP under a watch; writes down what was reported.

    python tests/watching/ddp_worker.py RANK DIRECTORY

`test_ddp.py` starts both. They meet through a file in ``DIRECTORY``; each writes ``RANK.json`` there:
step -> what is reported of it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hmpx


class Network(nn.Module):
    """Two layers, the second of which doesn't take large values, nor large gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), Widening()

    def forward(self, h: Tensor) -> Tensor:
        return self.second(self.first(h))


class Widening(nn.Module):
    """A linear layer of large weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 4), 40.0))

    def forward(self, h: Tensor) -> Tensor:
        return nn.functional.linear(h, self.weight)  # the fault


def step(model: nn.Module, size: float, scale: float) -> None:
    """Trains on inputs and with gradients of this size."""
    model.zero_grad()
    model(torch.full((2, 4), size)).float().mul(scale).sum().backward()


def said(offence: hmpx.Offence) -> dict[str, Any]:
    names = ("op", "module", "location", "phase", "kind", "source", "step")
    return {name: getattr(offence, name) for name in names}


def main(rank: int, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2
    )
    hmpx.convert(device_types={"cpu"}, low_precision_type=torch.float16, legalize="never")
    network = Network()
    nn.init.constant_(network.first.weight, 0.25)
    nn.init.constant_(network.first.bias, 0.0)
    model = DistributedDataParallel(network)
    found: dict[str, list[dict[str, Any]]] = {}
    with hmpx.watch("collect") as w:
        for name, (size, scale) in {
            "clean": (1.0, 1.0),
            "forward": (1.0 if rank == 0 else 6e3, 1.0),
            "clean again": (1.0, 1.0),
            "backward": (1e-3, 1.0 if rank == 0 else 2e3),
        }.items():
            before = len(w.offences)
            step(model, size, scale)
            w.step()
            found[name] = [said(each) for each in w.offences[before:]]
    (directory / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads may block Python's own exit (pytorch #190489)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
