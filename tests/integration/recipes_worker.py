"""One process of a group: trains in each recipe with DDP, and writes down what came of it.

python -m tests.integration.recipes_worker RANK WORLD_SIZE DIRECTORY
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hmpx

from .recipes import RECIPES, Network, losses, policy


def main() -> None:
    """Trains, and writes ``DIRECTORY/RANK.json``: recipe -> losses and parameters."""
    rank, size, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=size
    )
    report = {}
    for recipe in RECIPES:
        torch.manual_seed(0)
        model = DistributedDataParallel(Network())
        with hmpx.convert(policy=policy(recipe), device_types={"cpu"}):
            found = losses(model, 15, rank)
        values = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
        report[recipe] = {"losses": found, "parameters": values}
    (directory / f"{rank}.json").write_text(json.dumps(report), "utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
