"""The way of one call, of the first `hmpx.convert` and of `hmpx.tune`: how many functions of how many files run.

A reader follows these. Who makes one shorter lowers its limit; who needs more says why.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hmpx.torch_internals import torch_version
from tests import forks

#: What runs -> the most functions of hmpx, and the most files, that may run in it.
LIMITS = {
    "convert": (320, 65),
    "legalized linear": (22, 8),
    "linear in float8": (44, 14),
    "tune": (760, 105),
}

#: Prints how many run. Generated code, lambdas and comprehensions don't count.
SCRIPT = """
import inspect, sys
from pathlib import Path
import torch, hmpx
from torch import nn

what, root, seen = sys.argv[1], str(Path(hmpx.__file__).parent), set()

def note(frame, event, argument):
    code = frame.f_code
    is_named = code.co_flags & inspect.CO_NEWLOCALS and not code.co_name.startswith("<")
    if event == "call" and is_named and code.co_filename.startswith(root):
        seen.add((code.co_filename, code.co_name, code.co_firstlineno))

def convert():
    hmpx.convert(device_types={"cpu"})

def tune():
    linears = [nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)]
    model = nn.Sequential(linears[0], nn.GELU(), linears[1], nn.LayerNorm(16), linears[2], nn.Softmax(-1))
    inputs = [torch.randn(8, 16) for _ in range(3)]
    hmpx.tune(model, inputs, tolerance=1e-3, device_types={"cpu"}, progress=False)

def linear():
    nn.functional.linear(x, layer.weight, layer.bias)

torch.set_num_threads(1)
torch.manual_seed(0)
run = {"convert": convert, "tune": tune}.get(what, linear)
if run is linear:
    low = "float8_e4m3fn" if "float8" in what else None
    hmpx.convert(device_types={"cpu"}, **({"low_precision_type": low} if low else {}))
    x, layer = torch.randn(64, 256), nn.Linear(256, 256)
    for _ in range(3):  # the first calls measure and compile
        linear()
sys.setprofile(note)
try:
    run()
finally:
    sys.setprofile(None)
print(len(seen), len({file for file, *_ in seen}))
"""


@pytest.mark.parametrize("what", LIMITS)
def test_few_functions_in_few_files(what: str, tmp_path: Path) -> None:
    tree = str(Path(__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": tree}
    program = "-W", "ignore", "-c", SCRIPT, what
    done = forks.run(*program, cwd=tmp_path, env=environment, imported=forks.TORCH)
    assert done.returncode == 0, done.stderr
    functions, files = map(int, done.stdout.split()[-2:])
    of_older_torch = 3 * (torch_version() < (2, 13))  # fallbacks
    assert functions <= LIMITS[what][0] + of_older_torch
    assert files <= LIMITS[what][1]
