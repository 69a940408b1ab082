"""Processes that a program under ``hmpx run`` starts: they have the stand-in and the conversion."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hmpx
from hmpx.integrations import devices, spawning
from hmpx.integrations import shim as habana_shim

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(Path(hmpx.__file__).parent.parent),
    "OMP_NUM_THREADS": "1",
}


def finish(command: list[str], directory: Path) -> list[str]:
    """Returns the lines that ``command`` prints, sorted; it must end well."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=directory,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


#: Data are made in spawned workers, before and after the conversion, then two processes train.
SPAWNING = """
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import habana_frameworks.torch.core as htcore
from habana_frameworks.torch.distributed.hccl import initialize_distributed_hpu
from habana_frameworks.torch.hpex import hmp
from torch.utils.data import DataLoader, Dataset


class Data(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        x = torch.full((2, 2), index, dtype=torch.float32, device="hpu")
        return str((x @ x).dtype)


def show(when):
    loader = DataLoader(Data(), batch_size=2, num_workers=1, pin_memory_device="hpu")
    print(when, *next(iter(loader)), flush=True)


def work(rank, world_size):
    size, rank, _ = initialize_distributed_hpu(world_size, rank, rank)
    dist.init_process_group("hccl", rank=rank, world_size=size)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1).to("hpu"))
    output = model(torch.ones(4, 2, device="hpu"))
    output.sum().backward()
    htcore.mark_step()
    total = torch.tensor([float(rank + 1)]).to("hpu")
    dist.all_reduce(total)
    print(f"rank {rank} {output.dtype} {total.item()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=sys.argv[1])
    torch.multiprocessing.set_start_method("spawn")
    if "workers" in sys.argv:
        show("before")
    hmp.convert()
    if "workers" in sys.argv:
        show("after")
    else:
        mp.spawn(work, args=(2,), nprocs=2)
"""


def free_port() -> str:
    """Returns a port that nobody listens on."""
    import socket

    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        return str(listening.getsockname()[1])


@pytest.mark.slow
def test_spawned_trainers(tmp_path: Path) -> None:
    """Each imports the script, which imports habana_frameworks, and computes as its parent does."""
    (tmp_path / "train.py").write_text(SPAWNING)
    assert finish(["hmpx", "run", "--habana-shim", "train.py", free_port()], tmp_path) == [
        "rank 0 torch.bfloat16 3.0",
        "rank 1 torch.bfloat16 3.0",
    ]


@pytest.mark.slow
def test_spawned_workers(tmp_path: Path) -> None:
    """Those of data loaders; converted are those started since hmp.convert()."""
    (tmp_path / "train.py").write_text(SPAWNING)
    command = ["hmpx", "run", "--habana-shim", "train.py", free_port(), "workers"]
    assert finish(command, tmp_path) == [
        "after torch.bfloat16 torch.bfloat16",
        "before torch.float32 torch.float32",
    ]


LAUNCHED = """
import torch
import torch.distributed as dist
import habana_frameworks.torch.core.hccl
from habana_frameworks.torch.hpex import hmp
from habana_frameworks.torch.utils.distributed_utils import initialize_distributed_hpu

size, rank, local_rank = initialize_distributed_hpu()
dist.init_process_group("hccl", rank=rank, world_size=size)
hmp.convert()
x = torch.ones(2, 2, device=torch.device("hpu"))
dist.all_reduce(x)
line = f"{size} {rank} {local_rank} {(x @ x).dtype} {x[0, 0].item()}\\n"
print(line, end="", flush=True)  # in one piece: two processes write
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torchrun_starts_the_stand_in(tmp_path: Path) -> None:
    """``torchrun -m hmpx run --habana-shim`` in two processes."""
    (tmp_path / "train.py").write_text(LAUNCHED)
    command = "torch.distributed.run --nproc-per-node 2 --master-port"
    rest = ["-m", "hmpx", "run", "--habana-shim", "train.py"]
    assert finish([*command.split(), free_port(), *rest], tmp_path) == [
        f"2 {rank} {rank} torch.bfloat16 2.0" for rank in range(2)
    ]


GRANDCHILDREN = """
import multiprocessing

import torch


def tell(depth):
    x = torch.ones(2, 2)
    print(depth, (x @ x).dtype, torch.softmax(x, 0).dtype, flush=True)
    if depth:
        child = multiprocessing.get_context("forkserver").Process(target=tell, args=(depth - 1,))
        child.start()
        child.join()


if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=tell, args=(1,))
    child.start()
    child.join()
"""


@pytest.mark.slow
def test_hmpx_run_converts_children_of_children(tmp_path: Path) -> None:
    """Without the stand-in as well, by spawn and by forkserver."""
    (tmp_path / "low.txt").write_text("softmax\n")
    (tmp_path / "main.py").write_text(GRANDCHILDREN)
    options = ["--bf16", "low.txt", "--device-types", "cpu,cuda", "--legalize", "never"]
    assert finish(["hmpx", "run", *options, "main.py"], tmp_path) == [
        f"{depth} torch.float32 torch.bfloat16" for depth in range(2)
    ]


# --- what is sent -------------------------------------------------------------------------------


@pytest.fixture
def ends() -> Any:
    """Collects what is to be called at the end of the test."""
    calls: list[Callable[[], object]] = []
    yield calls
    for call in reversed(calls):
        call()


RESTORED = """
import pickle, sys
data = pickle.load(sys.stdin.buffer)
import torch
import habana_frameworks.torch.core
from hmpx.integrations import hpex as hmp
x = torch.ones(2, 2, device="hpu")
print((x @ x).dtype, dict(hmp.defaults()))
"""


def test_a_process_that_knows_nothing_is_prepared(ends: list[Any], tmp_path: Path) -> None:
    """By what it unpickles before all else, wherever hmpx is."""
    ends.append(spawning.follow())
    assert habana_shim.install({"legalize": "never"})
    ends.append(habana_shim.uninstall)
    with hmpx.convert(low_precision_type=torch.float16, device_types={devices.device_type()}):
        sent = pickle.dumps(spawning._Restored(spawning._state() or b""))
    done = subprocess.run(
        [sys.executable, "-c", RESTORED],
        input=sent,
        cwd=tmp_path,
        env={**ENVIRONMENT, "PYTHONPATH": ""},
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode() == "torch.float16 {'legalize': 'never'}\n"
