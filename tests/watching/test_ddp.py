"""Faults in one of two processes that train together: named where they are, and nowhere else."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

import hmpx
from tests import forks

WORKER = Path(__file__).parent / "ddp_worker.py"
TIMEOUT_S = 120

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without distributed"
)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Returns what each of the two processes reports."""
    directory = tmp_path_factory.mktemp("ddp")
    source = str(Path(hmpx.__file__).parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source}
    programs = [([str(WORKER), str(rank), str(directory)], environment) for rank in range(2)]
    ended = forks.run_together(programs, timeout=TIMEOUT_S)
    outputs = "".join(each.stdout + each.stderr for each in ended)
    assert [each.returncode for each in ended] == [0, 0], outputs
    return [json.loads((directory / f"{rank}.json").read_text("utf-8")) for rank in range(2)]


@pytest.mark.parametrize(("phase", "step"), [("forward", 1), ("backward", 3)])
def test_a_fault_is_named_in_its_process(
    reports: list[dict[str, Any]], phase: str, step: int
) -> None:
    lines = WORKER.read_text("utf-8").splitlines()
    (line,) = [number for number, text in enumerate(lines, 1) if "# the fault" in text]
    assert reports[1][phase][0] == {
        "op": "linear",
        "module": "second",
        "location": f"{WORKER}:{line}",
        "phase": phase,
        "kind": "overflow",
        "source": "op",
        "step": step,
    }


@pytest.mark.parametrize("step", ["clean", "clean again"])
def test_clean_steps_are_not_reported(reports: list[dict[str, Any]], step: str) -> None:
    assert [report[step] for report in reports] == [[], []]


@pytest.mark.parametrize("step", ["forward", "backward"])
def test_the_other_process_does_not_blame_its_own_ops(
    reports: list[dict[str, Any]], step: str
) -> None:
    """Gradients are added up across processes behind its ops, after all that is watched."""
    assert [each for each in reports[0][step] if each["source"] == "op"] == []
