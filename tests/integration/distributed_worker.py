"""One process of a group: trains with DDP and FSDP2 under hmpx, and writes down what it saw.

    python tests/integration/distributed_worker.py RANK WORLD_SIZE DIRECTORY

`test_distributed.py` starts one for each rank. They meet through a file in ``DIRECTORY``, so that
no port has to be free, and each writes ``DIRECTORY/RANK.json``: case -> its report. What the
reports should hold is not known here.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import hmpx

# Here, not in main(): a spawned child imports this file.
hmpx.convert(device_types={"cpu"}, legalize="never")

STEPS, BATCH, FEATURES, WIDTH, CLASSES = 6, 16, 8, 32, 4

Optimizer = torch.optim.Optimizer
Report = dict[str, Any]


class Network(nn.Module):
    """An MLP with a norm, an embedding, and branches of which a forward uses one.

    Args:
        branch_count: How many branches there are.
        use_reentrant: As in `checkpoint`, for the middle of the network; None for no checkpoint.
    """

    def __init__(self, branch_count: int = 1, use_reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.first = nn.Linear(FEATURES, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(branch_count))
        self.last = nn.Linear(WIDTH, CLASSES)
        self.use_reentrant = use_reentrant
        self.weight_dtypes: set[torch.dtype] = set()
        self.middle_runs = 0

    def forward(self, x: Tensor, branch: int) -> Tensor:
        hidden = self.first(x) + self.embedding(x.argmax(dim=1) % CLASSES)
        if self.use_reentrant is None:
            hidden = self.middle(hidden, branch)
        else:
            hidden = checkpoint(self.middle, hidden, branch, use_reentrant=self.use_reentrant)
        return self.last(hidden)

    def middle(self, hidden: Tensor, branch: int) -> Tensor:
        self.middle_runs += 1
        self.weight_dtypes.add(self.norm.weight.dtype)
        return torch.relu(self.branches[branch](self.norm(hidden)))


class Matmuls(TorchDispatchMode):
    """Collects the dtypes that matrix products compute in, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.seen |= {a.dtype for a in args if isinstance(a, Tensor)}
        return func(*args, **(kwargs or {}))


# --- training -----------------------------------------------------------------------------------


def part(step: int, index: int, parts: int) -> tuple[Tensor, Tensor]:
    """Returns one part of a step's batch; x: [batch / parts, features], y: [batch / parts]."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, FEATURES, generator=generator).chunk(parts)[index]
    return x, x.argmax(dim=1) % CLASSES


def adamw(module: nn.Module) -> Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def train_alone(parts: int, model: nn.Module, branch_count: int = 1) -> list[float]:
    """Returns the losses of one process that adds up the gradients of ``parts`` of each batch."""
    optimizer = adamw(model)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_parts = []
        for index in range(parts):
            x, y = part(step, index, parts)
            loss = F.cross_entropy(model(x, (step + index) % branch_count), y) / parts
            loss.backward()
            loss_parts.append(loss.item())
        optimizer.step()
        losses.append(sum(loss_parts))
    return losses


def train_together(
    model: nn.Module, optimizer: Optimizer, branch_count: int = 1, off_in_backward: bool = False
) -> list[float]:
    """Returns the losses of training on this rank's part of each batch, averaged over the ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    losses = []
    for step in range(STEPS):
        x, y = part(step, rank, world_size)
        loss = F.cross_entropy(model(x, (step + rank) % branch_count), y)
        optimizer.zero_grad()
        with hmpx.disable_casts() if off_in_backward else contextlib.nullcontext():
            loss.backward()
        optimizer.step()
        loss_parts = [torch.empty(()) for _ in range(world_size)]
        dist.all_gather(loss_parts, loss.detach())
        losses.append(sum(loss_part.item() / world_size for loss_part in loss_parts))
    return losses


def report_training(
    model: nn.Module, network: Network, train: Callable[[Optimizer], list[float]]
) -> tuple[Report, Optimizer]:
    """Trains ``model``, which holds ``network``; returns what was seen, and the optimizer."""
    optimizer = adamw(model)
    with Matmuls() as matmuls:
        losses = train(optimizer)
    report: Report = {
        "losses": losses,
        "matmuls": dtype_names(matmuls.seen),
        "weights in forward": dtype_names(network.weight_dtypes),
        "parameters": names(model.parameters()),
        "gradients": names(p.grad for p in model.parameters()),
        "optimizer state": names(floats(dict(optimizer.state))),
        "forwards a step": network.middle_runs / STEPS,
    }
    return report, optimizer


def report_data_parallel(model: nn.Module, network: Network) -> tuple[Report, Optimizer]:
    """Trains on parts of the batches, and in one process for comparison.

    Where there are checkpoints the backward pass, and so the recomputation, runs with casts off.
    """
    world_size, branch_count = dist.get_world_size(), len(network.branches)
    report, optimizer = report_training(
        model,
        network,
        lambda optimizer: train_together(
            model, optimizer, branch_count, off_in_backward=network.use_reentrant is not None
        ),
    )
    alone = Network(branch_count)
    report["one process, same parts"] = train_alone(world_size, alone, branch_count)
    report["parameters are those of one process"] = are_equal(
        map(whole, network.parameters()), alone.parameters()
    )
    with hmpx.disable_casts():
        fp32 = train_alone(world_size, Network(branch_count), branch_count)
    report["one process, fp32"] = fp32
    if network.use_reentrant is None and branch_count == 1:
        report["low matrices saved"] = low_matrices_saved(model)
    if branch_count == 1:  # else the parts of a batch go through different branches
        report["one process, whole batch"] = train_alone(1, Network())
    return report, optimizer


def low_matrices_saved(model: nn.Module) -> int:
    """Returns how many low-precision tensors of a weight's size a forward saves."""
    sizes = {WIDTH * FEATURES, WIDTH * WIDTH}
    found = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dtype is torch.bfloat16 and tensor.untyped_storage().nbytes() // 2 in sizes:
            found.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(part(0, 0, 1)[0], 0).float().sum()
    loss.backward()
    return len(found)


def names(tensors: Iterable[Tensor | None]) -> list[str]:
    """Returns the names of the floating dtypes that occur."""
    return dtype_names({t.dtype for t in tensors if t is not None and t.is_floating_point()})


def dtype_names(dtypes: set[torch.dtype]) -> list[str]:
    return sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)


def floats(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested dictionaries, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from floats(item)


# --- cases --------------------------------------------------------------------------------------


def ddp(branch_count: int = 1, use_reentrant: bool | None = None, **options: Any) -> Report:
    network = Network(branch_count, use_reentrant)
    return report_data_parallel(DistributedDataParallel(network, **options), network)[0]


def casting_again(case: Callable[[], Report]) -> Report:
    """Runs a case where autograd keeps no casts of parameters."""
    hmpx.convert(device_types={"cpu"}, legalize="never", keep_weight_casts=False)
    try:
        return case()
    finally:
        hmpx.convert(device_types={"cpu"}, legalize="never")


def sharded(
    use_reentrant: bool | None = None, mp_policy: MixedPrecisionPolicy | None = None
) -> Network:
    """Returns a network whose layers, and the rest of it, are sharded over the ranks."""
    network = Network(use_reentrant=use_reentrant)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (network.first, *network.branches, network):
        fully_shard(module, mesh=mesh, mp_policy=mp_policy or MixedPrecisionPolicy())
    return network


def fsdp(use_reentrant: bool | None = None, **mp_options: torch.dtype) -> Report:
    model = sharded(use_reentrant, MixedPrecisionPolicy(**mp_options))
    return report_data_parallel(model, model)[0]


def fsdp_with_states(directory: Path) -> Report:
    """Also clips gradients, and saves and loads full and sharded states."""
    model = sharded()
    report, optimizer = report_data_parallel(model, model)
    report |= clipping()
    report |= full_state(model)
    report |= sharded_state(model, optimizer, directory / "checkpoint")
    return report


def tensor_parallel() -> Report:
    """Splits two linear layers over the ranks; each rank sees the whole batch."""
    model = Network()
    plan = {
        "first": ColwiseParallel(output_layouts=Replicate()),
        "last": RowwiseParallel(input_layouts=Replicate()),
    }
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)

    def train(optimizer: Optimizer) -> list[float]:
        losses = []
        for step in range(STEPS):
            x, y = part(step, 0, 1)
            loss = F.cross_entropy(model(x, 0), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    report, _ = report_training(model, model, train)
    report["one process, whole batch"] = train_alone(1, Network())
    return report


def clipping() -> Report:
    """Clips sharded gradients with casts on and off."""
    model = sharded()
    x, y = part(0, dist.get_rank(), dist.get_world_size())
    F.cross_entropy(model(x, 0), y).backward()
    before = [local(p.grad).clone() for p in model.parameters()]
    results = []
    for casts in (contextlib.nullcontext(), hmpx.disable_casts()):
        for parameter, gradient in zip(model.parameters(), before, strict=True):
            local(parameter.grad).copy_(gradient)
        with casts:
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        clipped = [local(p.grad).clone() for p in model.parameters()]
        results.append([norm.full_tensor(), *clipped])
    return {
        "clipping is that of fp32": are_equal(*results),
        "clipping changes gradients": not are_equal(results[0][1:], before),
    }


def full_state(model: nn.Module) -> Report:
    """Gathers the full state, and puts it into a plain model and, by broadcast, a sharded one."""
    world_size, x = dist.get_world_size(), part(0, 0, 1)[0]
    alone = Network()
    train_alone(world_size, alone)
    gather = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(model, options=gather)
    from_full = sharded()
    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(from_full, dict(full), options=broadcast)
    report: Report = {
        "sharded model loads the full state": are_equal(
            map(local, from_full.parameters()), map(local, model.parameters())
        )
    }
    if dist.get_rank() == 0:  # only there the full state is
        plain = Network()
        plain.load_state_dict(full)
        trained = alone.state_dict()
        report |= {
            "full state": names(full.values()),
            "full state is that of one process": full.keys() == trained.keys()
            and are_equal(full.values(), [trained[name] for name in full]),
            "plain model loads the full state": torch.equal(plain(x, 0), alone(x, 0)),
        }
    return report


def sharded_state(model: nn.Module, optimizer: Optimizer, directory: Path) -> Report:
    """Saves model and optimizer shard by shard, loads them, and trains on with old and new."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory)
    new_model = sharded()
    new_optimizer = adamw(new_model)
    new_model_state, new_optimizer_state = get_state_dict(new_model, new_optimizer)
    state = {"model": new_model_state, "optimizer": new_optimizer_state}
    dcp.load(state, checkpoint_id=directory)
    set_state_dict(
        new_model,
        new_optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return {
        "sharded state": names(floats([state, model_state, optimizer_state])),
        "losses go on": train_together(model, optimizer),
        "losses after loading": train_together(new_model, new_optimizer),
    }


def local(tensor: Any) -> Tensor:
    """Returns this rank's shard of a DTensor."""
    return tensor.to_local()  # type: ignore[no-any-return]


def whole(tensor: Any) -> Tensor:
    """Returns all of a DTensor, gathered from the ranks, and any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # type: ignore[no-any-return]


def are_equal(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> bool:
    return all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


#: Checkpoints are recomputed inside DDP's and FSDP2's hooks; reentrant ones need a static graph.
CASES: dict[str, Callable[[Path], Report]] = {
    "ddp": lambda _: ddp(),
    "ddp static graph": lambda _: ddp(use_reentrant=True, static_graph=True),
    "ddp bucket view": lambda _: ddp(use_reentrant=False, gradient_as_bucket_view=True),
    "ddp unused parameters": lambda _: ddp(branch_count=2, find_unused_parameters=True),
    "fsdp": fsdp_with_states,
    "fsdp checkpoints": lambda _: fsdp(use_reentrant=False),
    "fsdp mixed": lambda _: fsdp(
        use_reentrant=False, param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    ),
    "ddp casting again": lambda _: casting_again(ddp),
    "fsdp casting again": lambda _: casting_again(fsdp),
    "tensor parallel": lambda _: tensor_parallel(),
}


# --- processes ----------------------------------------------------------------------------------


class MatmulDtypes(torch.utils.data.Dataset[str]):
    """Computes its only item: the dtype of a matrix product."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> str:
        return str((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)


def main(rank: int, world_size: int, directory: Path) -> None:
    torch.set_num_threads(1)
    # Started before the group, which has threads: those don't survive a fork.
    start_method = "spawn" if rank == 0 else "fork"
    loaded = iter(
        DataLoader(
            MatmulDtypes(), batch_size=None, num_workers=1, multiprocessing_context=start_method
        )
    )
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world_size
    )
    reports = {name: case(directory) for name, case in CASES.items()}
    reports["loader"] = {"start method": start_method, "matmuls": list(loaded)}
    (directory / f"{rank}.json").write_text(json.dumps(reports), encoding="utf-8")
    dist.destroy_process_group()
    # DTensors leave references to the group behind, and so gloo's threads: one of them may abort or
    # block Python's own exit (pytorch #190489).
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
