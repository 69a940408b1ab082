"""Trains on several processes, with DDP and FSDP2, and shows that the losses are those of one.

    torchrun --standalone --nproc-per-node 2 examples/ddp.py

Each process calls `hmpx.convert` itself; that is all. What DDP and FSDP2 keep and send stays
float32: parameters, gradients, optimizer state. Each process sees its part of the batch, and the
gradient of a part is rounded to bfloat16 before the sum, not after it: hence the small difference
to one process.

A process that Python spawns (`torch.multiprocessing.spawn`, a `DataLoader` whose workers are
spawned) starts with an unpatched torch. It is converted if `hmpx.convert` stands at module level in
the script, outside ``if __name__ == "__main__"``, or in the function that it runs.

FSDP2's own ``MixedPrecisionPolicy(param_dtype=torch.bfloat16)`` may be used as well: it halves what
is gathered, but ops that the lists hold in fp32 then see weights that were rounded already.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import hmpx

BATCH, FEATURES, WIDTH, CLASSES = 16, 12, 32, 4


def build(device: torch.device) -> nn.Module:
    """Returns the same small classifier each time, in every process."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.LayerNorm(WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, CLASSES),
    ).to(device)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Returns random points; the class of one is the greatest of its first coordinates."""
    x = torch.randn(BATCH, FEATURES, generator=torch.Generator().manual_seed(step))
    return x, x[:, :CLASSES].argmax(dim=1)


def train(
    model: nn.Module, steps: int, device: torch.device, part: int = 0, parts: int = 1
) -> tuple[list[float], str]:
    """Trains on one part of each batch.

    Returns:
        The loss of each step, averaged over the parts, and the dtypes at the end.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        x, y = (tensor.chunk(parts)[part].to(device) for tensor in batch(step))
        output = model(x)
        loss = F.cross_entropy(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # casts are off inside, without being asked
        mean = loss.detach() / parts
        if parts > 1:
            dist.all_reduce(mean)
        losses.append(mean.item())
    parameters = list(model.parameters())
    state = [value for values in optimizer.state.values() for value in values.values()]
    return losses, (
        f"output {dtypes([output])}, parameters {dtypes(parameters)}, "
        f"gradients {dtypes(p.grad for p in parameters)}, optimizer state {dtypes(state)}"
    )


def dtypes(tensors: Iterable[Tensor | None]) -> str:
    """Returns the names of the floating dtypes that occur."""
    found = {t.dtype for t in tensors if t is not None and t.is_floating_point()}
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found))


def compare(steps: int, device: torch.device) -> None:
    """Prints the losses of one process and of all of them, and the dtypes in each process."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    fp32, _ = train(build(device), steps, device)

    hmpx.convert(device_types={device.type})
    alone, _ = train(build(device), steps, device)
    ddp, ddp_dtypes = train(DistributedDataParallel(build(device)), steps, device, rank, world_size)
    mesh = init_device_mesh(device.type, (world_size,))
    fsdp, fsdp_dtypes = train(
        fully_shard(build(device), mesh=mesh), steps, device, rank, world_size
    )

    found = [""] * world_size
    dist.all_gather_object(found, f"DDP:   {ddp_dtypes}\n  FSDP2: {fsdp_dtypes}")
    if rank == 0:
        print(f"processes: {world_size}, on {device.type}")
        print(" step  1 process, fp32  1 process, hmpx   DDP, hmpx  FSDP2, hmpx")
        for step, row in enumerate(zip(fp32, alone, ddp, fsdp, strict=True), start=1):
            if step in (1, steps) or step % max(1, steps // 5) == 0:
                print("{:5}  {:15.4f}  {:15.4f}  {:10.4f}  {:11.4f}".format(step, *row))
        for each_rank, text in enumerate(found):
            print(f"rank {each_rank}\n  {text}")


def main() -> None:
    """Joins the other processes, compares, and leaves."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("start me with torchrun, as my docstring says")
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    compare(options.steps, device)
    dist.destroy_process_group()
    if device.type == "cpu":
        # FSDP2 leaves references to the group behind, and so gloo's threads: one of them may abort
        # or block Python's own exit (pytorch #190489).
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
