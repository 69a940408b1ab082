"""HPU without the hardware: decisions on fake tensors of that device, and its detection.

Both change the process for good (a device is registered, a package becomes importable), so they
run in a process of their own.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.backend_registration

from tests import forks

HAS_PYTHON_BACKENDS = hasattr(
    torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"
)

#: Prints {name: dtype, device or number}; ends without cleaning up, which a backend written in
#: Python does not survive after a backward.
DECISIONS = """
import json
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("hpu")

import hmpx

found = {"device_types": sorted(hmpx.convert().device_types)}
hmpx.revert()


def hpu(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype, device="hpu")


def note(name, value):
    found[name] = str(value).removeprefix("torch.")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):  # x: [b, s, w]
        q, k, v = self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5  # [b, s, s]
        probabilities = scores.softmax(-1)
        note("gpt scores", scores.dtype)
        note("gpt probabilities", probabilities.dtype)
        x = x + self.out(probabilities @ v)
        return x + self.mlp(self.norm_2(x))


class Gpt(nn.Module):
    def __init__(self, vocabulary=50, width=16):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        return self.head(self.blocks(self.embedding(ids)))


def train():
    with torch.device("hpu"):
        model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 50, (2, 6), device="hpu")
    for _ in range(2):
        logits = model(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        with hmpx.disable_casts():
            optimizer.step()
    note("gpt logits", logits.dtype)
    note("gpt loss", loss.dtype)
    note("gpt device", loss.device.type)
    tensors = {
        "parameters": [*model.parameters()],
        "gradients": [p.grad for p in model.parameters()],
        "moments": [s["exp_avg"] for s in optimizer.state.values()],
    }
    for name, values in tensors.items():
        note(f"gpt {name}", *{t.dtype for t in values})


bf16 = torch.bfloat16
with FakeTensorMode(), hmpx.convert(device_types={"hpu"}):
    x, low = hpu(2, 4), hpu(2, 4, dtype=bf16)
    weight, kernel, image = hpu(3, 4), hpu(4, 3, 3, 3), hpu(1, 3, 8, 8)
    mean, var = (torch.empty(3, device="hpu") for _ in range(2))
    target = torch.zeros(2, dtype=torch.long, device="hpu")
    note("device", x.device.type)
    note("linear", F.linear(x, weight).dtype)
    note("linear module", nn.Linear(4, 3, device="hpu")(x).dtype)
    note("conv2d", F.conv2d(image, kernel).dtype)
    note("matmul", torch.matmul(x, weight.t()).dtype)
    note("@", (x @ weight.T).dtype)
    note("relu", x.relu().dtype)
    note("layer_norm", F.layer_norm(x, (4,), hpu(4), hpu(4)).dtype)
    note("batch_norm", F.batch_norm(image, mean, var, hpu(3), hpu(3), training=True).dtype)
    note("running mean", mean.dtype)
    note("softmax", F.softmax(low, dim=-1).dtype)
    note("log", low.log().dtype)
    note("cross_entropy", F.cross_entropy(low, target).dtype)
    note("add", (x + low).dtype)
    note("cat", torch.cat([low, x]).dtype)
    note("gelu", F.gelu(low).dtype)
    note("add_", low.clone().add_(x).dtype)
    note("float64", F.linear(x.double(), weight.double()).dtype)
    note("linear on the cpu", F.linear(torch.randn(2, 4), torch.randn(3, 4)).dtype)
    note("softmax on the cpu", F.softmax(torch.randn(2, 4, dtype=bf16), dim=-1).dtype)
    with hmpx.disable_casts():
        note("linear with casts off", F.linear(x, weight).dtype)
    train()
with FakeTensorMode():
    note("linear after revert", F.linear(hpu(2, 4), hpu(3, 4)).dtype)

print(json.dumps(found), flush=True)
os._exit(0)
"""

EXPECTED: dict[str, Any] = {
    "device_types": ["hpu"],
    "device": "hpu",
    # the low-precision list
    "linear": "bfloat16",
    "linear module": "bfloat16",
    "conv2d": "bfloat16",
    "matmul": "bfloat16",
    "@": "bfloat16",
    "running mean": "float32",
    # the float32 list
    "softmax": "float32",
    "log": "float32",
    "cross_entropy": "float32",
    # neither
    "relu": "float32",
    "layer_norm": "float32",
    "batch_norm": "float32",
    "add": "float32",
    "cat": "float32",
    "gelu": "bfloat16",
    "add_": "bfloat16",
    "float64": "float64",
    "linear on the cpu": "float32",
    "softmax on the cpu": "bfloat16",
    "linear with casts off": "float32",
    "linear after revert": "float32",
    # a training step
    "gpt device": "hpu",
    "gpt scores": "bfloat16",
    "gpt probabilities": "float32",
    "gpt logits": "bfloat16",
    "gpt loss": "float32",
    "gpt parameters": "float32",
    "gpt gradients": "float32",
    "gpt moments": "float32",
}


def run(script: str, *paths: Path) -> Any:
    """Returns what ``script``, in a process without accelerators, prints as JSON last."""
    search = [*map(str, paths), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, search)),
    }
    process = forks.run("-c", script, env=environment)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.skipif(not HAS_PYTHON_BACKENDS, reason="this torch has no backends written in Python")
def test_decisions_on_hpu() -> None:
    """Ops on HPU tensors are cast as the default lists say, through forward, backward and AdamW."""
    assert run(DECISIONS) == EXPECTED


#: Prints candidate -> figures and ops of a step. Models that make empty tensors by strides, as Llama
#: and ResNet do in their backward, need an allocator that a backend written in Python does not have.
KERNELS = """
import json, os
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("hpu")

from tests.fake_cuda import candidates

names = ("fp32", "hmpx", "casts by hand", "hmpx products")
steps = {name: candidates.kernels("vit", name, "hpu") for name in names}
found = {
    name: {**candidates.summary(kernels), "ops": [str(kernel) for kernel in kernels]}
    for name, kernels in steps.items()
}
print(json.dumps(found), flush=True)
os._exit(0)
"""


@pytest.mark.models
@pytest.mark.skipif(not HAS_PYTHON_BACKENDS, reason="this torch has no backends written in Python")
def test_kernels_on_hpu() -> None:
    """A step makes the calls of casts by hand, beside those of the loss, and waits for nothing."""
    pytest.importorskip("transformers")
    found = run(KERNELS, Path(__file__).parents[2])
    assert found["hmpx products"]["ops"] == found["casts by hand"]["ops"]
    loss = 2  # it is cast to fp32, and its gradient back
    assert found["hmpx"]["kernels"] == found["casts by hand"]["kernels"] + loss
    assert found["hmpx"]["bytes"] == pytest.approx(found["casts by hand"]["bytes"], rel=1e-4)
    assert not any(figures["waits"] or figures["moves"] for figures in found.values())


DETECTION = """
import json
import sys

import hmpx

found = sorted(hmpx.convert().device_types)
print(json.dumps([found, "habana_frameworks" in sys.modules]))
"""


@pytest.mark.skipif(
    importlib.util.find_spec("habana_frameworks") is not None
    or getattr(torch.accelerator.current_accelerator(), "type", "cuda") != "cuda",
    reason="this machine has an accelerator that can't be hidden from torch",
)
def test_importable_habana_frameworks_means_hpu(
    tmp_path: Path,
) -> None:
    """Finding the package is enough; it is not imported, which would start the device."""
    package = tmp_path / "habana_frameworks" / "torch"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    assert run(DETECTION, tmp_path) == [["hpu"], False]
