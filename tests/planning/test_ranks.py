"""What each process of several holds is what it holds in a run of two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed

import hmpx

from .rank_worker import Model

WORKER = Path(__file__).parent / "rank_worker.py"
WORLD_SIZE, TIMEOUT_S = 2, 120

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without distributed"
)


@pytest.mark.sampled(3)
def test_arithmetic_agrees_with_two_processes(tmp_path: Path) -> None:
    """By FSDP2, whose parts of odd rows are padded, and by DDP."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(WORLD_SIZE), str(tmp_path)],
            env=environment,
            stderr=subprocess.PIPE,
        )
        for rank in range(WORLD_SIZE)
    ]
    try:
        errors = [each.communicate(timeout=TIMEOUT_S)[1].decode() for each in processes]
    finally:
        for each in processes:
            each.kill()
    assert [each.returncode for each in processes] == [0, 0], errors
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(WORLD_SIZE)]
    plan = hmpx.plan(Model, torch.ones(4, 16), device="cpu", legalize="never")
    for strategy in ("fsdp2", "ddp"):
        found = plan.per_rank(WORLD_SIZE, strategy)
        first = reports[0][strategy]
        assert found.parameter_bytes == first["parameters"]
        assert found.gradient_bytes == first["gradients"]
        assert found.optimizer_bytes == first["states"]
        assert all(first[name] >= reports[1][strategy][name] for name in first)
    assert plan.per_rank(WORLD_SIZE).gathered_bytes == sum(sorted(reports[0]["gathered"])[-2:])
    assert plan.per_rank(WORLD_SIZE, "ddp").bucket_bytes == plan.gradient_bytes
    assert plan.per_rank(WORLD_SIZE).weight_cast_bytes == plan.weight_cast_bytes > 0


def test_wrong_arguments_are_errors() -> None:
    """That name them."""
    plan = hmpx.plan(Model, torch.ones(4, 16), device="hpu")
    for arguments, message in (
        ((0,), "at least 1"),
        ((True,), "world_size"),
        ((2, "zero"), "strategy"),
        ((2, "ddp", "x"), "'x'"),
    ):
        with pytest.raises(hmpx.OptionError, match=message):
            plan.per_rank(*arguments)  # type: ignore[arg-type]
