"""One process of two that train with DDP under a monitor; writes down what was logged.

python tests/monitoring/ddp_worker.py RANK DIRECTORY
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hmpx


def main(rank: int, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    logged: list[Any] = []
    limits = {"*/input/zeros": 0.3}
    thirds = hmpx.formats.Custom("thirds", lambda x: (x * 3).round() / 3)
    hmpx.formats.register(thirds)
    with (
        hmpx.convert(device_types={"cpu"}),
        hmpx.monitor(
            every=2,
            formats=["thirds"],
            log=lambda figures, step: logged.append(figures),
            alarms=limits,
            on_alarm="collect",
        ) as monitor,
    ):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 4), float(rank))).sum().backward()  # those of rank 0 are zeros
            optimizer.step()
    found = {
        "steps": len(logged),
        "figures": monitor.figures,
        "alarms": [each.name for each in monitor.alarms],
    }
    (directory / f"{rank}.json").write_text(json.dumps(found), "utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
