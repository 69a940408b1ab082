"""One process of two that train under a monitor: with DDP, with FSDP2, and with steps that differ; writes down the figures.

python tests/monitoring/ddp_worker.py RANK DIRECTORY
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hmpx


def with_ddp(rank: int) -> dict[str, Any]:
    """Rank 0 has zeros."""
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
            model(torch.full((2, 4), float(rank))).sum().backward()
            optimizer.step()
    alarms = [each.name for each in monitor.alarms]
    return {"steps": len(logged), "figures": monitor.figures, "alarms": alarms}


def with_fsdp(rank: int) -> dict[str, Any]:
    """Seven rows are four and three; compares with figures of the whole parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).bfloat16()
    for each in model:
        fully_shard(each)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-9)
    x = torch.randn(4, 5).mul(rank + 1).bfloat16()
    with hmpx.monitor(every=1, on_alarm="collect") as monitor:
        for _ in range(2):
            model(x).float().square().mean().backward()
            optimizer.step()
    whole: dict[str, float] = {}
    for name, each in model.named_parameters():
        path = name.replace(".", "/")
        gradient = each.grad.full_tensor()  # type: ignore[union-attr]
        state = optimizer.state[each]["exp_avg"].full_tensor()
        whole[f"hmpx/{path}/gradient/amax"] = gradient.abs().max().item()
        whole[f"hmpx/{path}/gradient/zeros"] = (gradient == 0).double().mean().item()
        whole[f"hmpx/{path}.exp_avg/state/amax"] = state.abs().max().item()
    return {"figures": monitor.figures, "whole": whole}


def with_steps_that_differ(rank: int) -> dict[str, Any]:
    """In each step a process does other things, or nothing; counts the collectives."""
    reduced: list[int] = []
    all_reduce = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        reduced[-1] += 1
        return all_reduce(*args, **kwargs)

    def calls(step: int) -> Iterator[Any]:
        if step != 1 or rank:  # rank 0 skips step 1
            yield torch.tensor([1.0, 0.0]) * (1 + rank + step)
        if (step, rank) in ((2, 0), (4, 0), (3, 1)):  # the one that the other does not do
            yield torch.sigmoid(torch.zeros(3))
        if (step, rank) == (2, 1):
            yield torch.full((2,), torch.inf).exp2()

    figures = []
    dist.all_reduce = counted
    with hmpx.monitor(every=1, on_alarm="collect") as monitor:
        for step in range(6):
            reduced.append(0)
            for _ in calls(step):
                pass
            monitor.step()
            figures.append(monitor.figures)
    dist.all_reduce = all_reduce
    return {"figures": figures, "reduced": reduced}


def main(rank: int, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=2)
    found = {each.__name__: each(rank) for each in (with_ddp, with_fsdp, with_steps_that_differ)}
    (directory / f"{rank}.json").write_text(json.dumps(found), "utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
