"""One rank of a run by FSDP2, and of one by DDP: writes the bytes that it holds.

python rank_worker.py RANK WORLD_SIZE DIRECTORY
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    """Three blocks with odd numbers of rows, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 33), nn.Linear(33, 16)])
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:  # [batch, 16]
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)  # type: ignore[no-any-return]


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


def held(tensors: list[Any]) -> int:
    """Returns the bytes of tensors' memory here."""
    found = [local(each) for each in tensors]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in found}
    return sum(each.nbytes() for each in storages.values())


def step(model: nn.Module) -> dict[str, int]:
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 16)).sum().backward()
    optimizer.step()
    states = [each for state in optimizer.state.values() for each in state.values()]
    return {
        "parameters": held(list(model.parameters())),
        "gradients": held([each.grad for each in model.parameters()]),
        "states": held(states),
    }


def gathered(model: nn.Module) -> list[int]:
    """Returns the bytes of the whole parameters of each group, once they are gathered."""
    found = []
    for module in [*model.blocks, model]:  # type: ignore[misc]
        module.unshard()
        own = list(module.parameters(recurse=module is not model))
        own = own if module is not model else list(model.head.parameters())  # type: ignore[union-attr]
        found.append(sum(each.numel() * each.element_size() for each in own))
        module.reshard()
    return found


def main() -> None:
    rank, world_size, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world_size
    )
    sharded = Model()
    mesh = init_device_mesh("cpu", (world_size,))
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    report = {"fsdp2": step(sharded), "gathered": gathered(sharded)}
    replicated = DistributedDataParallel(Model())
    report["ddp"] = step(replicated)
    (directory / f"{rank}.json").write_text(json.dumps(report), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
