"""What a program pays before its first op: `import hmpx` after torch, and the first `convert()`; and for blocks.

    python benchmarks/first_use.py --save

CPU time, in processes of their own, median over them. Also as shares of what `import torch` takes in the
same process, which hold on a machine that is busy, too. ``gc_ms`` is the part of the import that Python's
garbage collector takes, which looks through what torch has made. Nothing is compiled and no connection is
opened: the processes have no compiler to call and no sockets to open. ``block_ratio`` is the time to enter and
leave a ``with hmpx.convert():`` that equals the one before, over that of a region of torch.autocast, and
``writes_ratio`` over that of a loop that writes most of its slots and restores them. All three take turns.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

import timing

PROGRAM = """
import gc, json, os, socket, subprocess, time

def refuse(*arguments, **more):
    raise AssertionError("no compiler and no network on the way to the first op")

start = time.process_time()
import torch
torch_s = time.process_time() - start
subprocess.Popen = socket.socket = os.system = refuse
spent = begun = 0.0

def watch(phase, info):
    global spent, begun
    if phase == "start":
        begun = time.process_time()
    else:
        spent += time.process_time() - begun

gc.callbacks.append(watch)
start = time.process_time()
import hmpx
import_s, gc_s = time.process_time() - start, spent
start = time.process_time()
hmpx.convert()
convert_s = time.process_time() - start
hmpx.revert()

def block():
    with hmpx.convert():
        pass

def region():
    with torch.autocast("cpu"):
        pass

F = torch.nn.functional
parts = torch._C._nn, torch._C._linalg, torch._C._special, torch._C._fft
owners = torch, torch.Tensor, F, torch.linalg, torch.special, torch.fft, *parts
before = {owner: dict(vars(owner)) for owner in owners}
with hmpx.convert():
    patched = [(o, n) for o in owners for n, v in vars(o).items() if before[o].get(n) is not v]
slots = [(owner, name, before[owner].get(name, block)) for owner, name in patched]  # not wrappers

def writes():
    for slot in slots:
        setattr(*slot)
    for owner, name, value in slots:
        if value is block:
            delattr(owner, name)
        else:
            setattr(owner, name, value)

fastest = dict.fromkeys((block, region, writes), float("inf"))
for turn in range(300):
    for enter in fastest:
        start = time.perf_counter()
        enter()
        fastest[enter] = min(fastest[enter], time.perf_counter() - start)
print(json.dumps([torch_s, import_s, gc_s, convert_s, *fastest.values()]))
"""


def measure() -> list[float]:
    """Returns the CPU seconds of importing torch, of importing hmpx, of its garbage, and of `convert`.

    Then the seconds of an equal block, of a region of torch.autocast, and of writing the slots.
    """
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, check=True, capture_output=True, text=True
    )
    return [float(each) for each in json.loads(done.stdout)]


def main() -> None:
    """Prints the figures, and saves them if asked to."""
    parser = timing.make_parser(__doc__)
    parser.add_argument("--processes", type=int, default=9)
    options = parser.parse_args()
    measure()  # writes the bytecode
    runs = [measure() for _ in range(options.processes)]
    torch_ms, import_ms, gc_ms, convert_ms, block_ms, *_ = (
        1e3 * statistics.median(column) for column in zip(*runs, strict=True)
    )
    figures = {
        "import_torch_ms": torch_ms,
        "import_ms": import_ms,
        "import_gc_ms": gc_ms,
        "convert_ms": convert_ms,
        "import_share": statistics.median(run[1] / run[0] for run in runs),
        "convert_share": statistics.median(run[3] / run[0] for run in runs),
        "block_ms": block_ms,
        "block_ratio": statistics.median(run[4] / run[5] for run in runs),
        "writes_ratio": statistics.median(run[4] / run[6] for run in runs),
    }
    for name, figure in figures.items():
        print(f"{name:16} {figure:8.3f}")
    timing.save(options.save, "first_use", {"figures": figures}, device="cpu", threads=1)


if __name__ == "__main__":
    main()
