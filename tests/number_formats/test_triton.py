"""Rounding in Triton: its arithmetic by the interpreter, on the CPU; and what happens without it."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from hmpx.formats import get
from hmpx.number_formats.kernels import gpu

#: The interpreter is chosen where Triton is imported, and for all of a process.
INTERPRETED = """
import math, sys, torch
from hmpx.formats import Fixed, Float, Posit, get
from hmpx.number_formats import gpu_rounding, torch_rounding
from hmpx.number_formats.kernels import gpu, triton_kernels

usual, triton_kernels._SIZE = triton_kernels._SIZE, 1 << 17  # the interpreter takes its time for each program
torch.manual_seed(0)
every = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
bits = torch.randint(-(2**31), 2**31, (10000,)).to(torch.int32).view(torch.float32)
near = torch.randn(5000) * 2.0 ** torch.randint(-30, 30, (5000,))
special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-40, 0.5, 1.5, -2.5])
x = torch.cat((bits, near, special, every.view(torch.bfloat16).float()))
known = ["bfloat16", "tf32", "fp24", "float8_e4m3fn", "float8_e5m2fnuz", "float4_e2m1fn", "posit8_0"]
known += ["posit16_1", "posit16_2", Fixed("q4_4", 4, 4), Float("flushed", 4, 3, subnormals=False)]
known += [Float("wide", 8, 7, subnormals=False), Float("e5m4", 5, 4), Posit("p6", 6, 2)]
integers = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
count = 0
for format in map(get, known):
    for dtype, given in (
        (torch.float32, x), (torch.bfloat16, every.view(torch.bfloat16)), (torch.float16, every.view(torch.float16)),
    ):
        modes = ("nearest", "toward_zero", "up", "down", "nearest_away", "stochastic")
        for mode in modes if dtype is torch.float32 else ("nearest", "stochastic"):
            for overflow in (None, "saturate"):
                plan = format.plan(dtype, mode, overflow)
                if plan is None or not gpu.has_kernel(plan):
                    continue
                found = gpu_rounding.rounded_on_gpu(given, plan, torch.Generator().manual_seed(4))
                wanted = torch_rounding.by_traceable_ops(given, plan, None, torch.Generator().manual_seed(4), None)
                a, b = (t.view(integers[dtype]).masked_fill(t.isnan(), -1) for t in (found, wanted))
                differing = (a != b).nonzero().flatten()
                if len(differing):
                    first = differing[0]
                    sys.exit(f"{format.name} {mode} {overflow} {dtype}: {len(differing)} differ, "
                             f"{given[first].item()!r} -> {found[first].item()!r}, not {wanted[first].item()!r}")
                count += 1
plan = get("float8_e4m3fn").plan(torch.float32, "nearest", None)
noisy = get("float8_e4m3fn").plan(torch.float32, "stochastic", None)
y, triton_kernels._SIZE = torch.randn(6, 70, 8), usual
for part in (y, y.transpose(0, 2), y[:, ::2], y[:0], y[0, 0, 0], y[:1].expand(3, 70, 8)):
    for each in (plan, noisy):
        found = gpu_rounding.rounded_on_gpu(part, each, torch.Generator().manual_seed(4))
        wanted = torch_rounding.by_traceable_ops(part, each, None, torch.Generator().manual_seed(4), None)
        assert torch.equal(found, wanted) and found.stride() == part.clone().stride()
print("same", count)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_arithmetic_by_the_interpreter() -> None:
    """As torch ops, bit for bit: each family, mode and overflow, every number of 16 bits."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    name, count = run.stdout.split()
    assert name == "same"
    assert int(count) > 100


def test_nothing_is_imported_before_a_gpu_is_rounded_on() -> None:
    """Triton takes time to import, and CPUs have no use for it."""
    program = (
        "import sys, torch, hmpx; hmpx.formats.quantize(torch.ones(3), 'float8_e4m3fn'); "
        "print('triton' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert run.stdout.split() == ["False"]


def test_a_gpu_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch ops do it, without a word: Triton is optional."""
    plan = get("float8_e4m3fn").plan(torch.float32, "nearest", None)
    assert plan is not None
    monkeypatch.setattr(gpu, "_found", [])
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, f"{gpu.__package__}.triton_kernels", raising=False)
    assert not gpu.has_kernel(plan)


def test_kernels_that_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """``HMPX_KERNELS=off`` holds for GPUs, too."""
    plan = get("float8_e4m3fn").plan(torch.float32, "nearest", None)
    assert plan is not None
    monkeypatch.setattr(gpu, "_found", [])
    monkeypatch.setenv("HMPX_KERNELS", "off")
    monkeypatch.setattr(gpu.importlib, "import_module", lambda name: pytest.fail(name))
    assert not gpu.has_kernel(plan)


def test_a_kernel_that_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line in the log; nothing is tried again."""

    def launch(*_: object) -> None:
        raise RuntimeError("no ptxas\nand more")

    plan = get("float8_e4m3fn").plan(torch.float32, "nearest", None)
    assert plan is not None
    monkeypatch.setattr(gpu, "_found", [SimpleNamespace(launch=launch, KINDS={"float"})])
    assert gpu.has_kernel(plan)
    with caplog.at_level(logging.WARNING, "hmpx"):
        assert gpu.rounded(torch.randn(3), plan, None) is None
    (record,) = caplog.records
    assert "no ptxas; HMPX_KERNELS=off hides this" in record.getMessage()
    assert not gpu.has_kernel(plan)
