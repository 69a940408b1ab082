"""Processes and threads train together as one process does: DDP, FSDP2, DTensor, DataParallel."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

from tests import forks

WORKER = Path(__file__).parent / "distributed_worker.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp.py"
WORLD_SIZE, TIMEOUT_S = 2, 300
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}

#: Half an ulp of bfloat16 is 2**-9, relatively. The gradient of a batch is rounded once as a whole,
#: or each part of it on its own: two roundings differ.
RTOL = 2**-8
#: Against fp32: inputs, weights and outputs of three linear layers are rounded, about 8 times.
RTOL_FP32 = 2**-6

DDP = ("ddp", "ddp static graph", "ddp bucket view", "ddp unused parameters", "ddp casting again")
FSDP = ("fsdp", "fsdp checkpoints", "fsdp mixed", "fsdp casting again")
CASES = (*DDP, *FSDP, "tensor parallel")

Reports = list[dict[str, Any]]

needs_distributed = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without distributed"
)


# --- processes ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """Returns what each rank reports; all tests, in all of pytest's processes, share one run."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    directory = root / "distributed"
    result = directory / "result.json"
    try:
        directory.mkdir()
    except FileExistsError:  # another process of pytest has started the run
        deadline = time.monotonic() + TIMEOUT_S + 30
        while not result.exists():
            assert time.monotonic() < deadline, "the run in another process of pytest has no result"
            time.sleep(0.1)
    else:
        partial = directory / "result.partial"
        partial.write_text(json.dumps(run_workers(directory)), encoding="utf-8")
        partial.rename(result)
    errors, by_rank = json.loads(result.read_text("utf-8"))
    assert not errors, errors
    return by_rank  # type: ignore[no-any-return]


def run_workers(directory: Path) -> tuple[str, Reports]:
    """Runs one process a rank; returns what they wrote, errors if anything, and their reports."""
    ranks = [str(rank) for rank in range(WORLD_SIZE)]
    places = str(WORLD_SIZE), str(directory)
    programs = [([str(WORKER), rank, *places], ENVIRONMENT) for rank in ranks]
    ended = forks.run_together(programs, timeout=TIMEOUT_S)
    codes = [each.returncode for each in ended]
    errors = "".join(each.stdout + each.stderr for each in ended)
    if errors or any(codes):
        return f"exit codes {codes} (-9: killed, since another had failed)\n{errors}", []
    return "", [json.loads((directory / f"{r}.json").read_text("utf-8")) for r in range(WORLD_SIZE)]


@needs_distributed
@pytest.mark.parametrize("case", CASES)
def test_every_rank_casts(reports: Reports, case: str) -> None:
    """On both ranks each matrix product, forward and backward, is one of bf16 and nothing else."""
    assert [report[case]["matmuls"] for report in reports] == [["bfloat16"]] * WORLD_SIZE


@needs_distributed
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kept", ["parameters", "gradients", "optimizer state"])
def test_what_is_kept_stays_fp32(reports: Reports, case: str, kept: str) -> None:
    """Whatever the ops between them compute in."""
    assert [report[case][kept] for report in reports] == [["float32"]] * WORLD_SIZE


@needs_distributed
@pytest.mark.parametrize("case", [case for case in (*DDP, *FSDP) if case != "fsdp mixed"])
def test_losses_and_parameters_are_those_of_one_process(reports: Reports, case: str) -> None:
    """One that adds up the parts' gradients: bit for bit (pytorch #102731, #105348).

    Dividing by two is exact, and a sum of two does not depend on their order.
    """
    for report in (report[case] for report in reports):
        assert report["losses"] == report["one process, same parts"]
        assert report["parameters are those of one process"]
        assert report["losses"] != report["one process, fp32"]
        assert report["losses"][-1] < 0.6 * report["losses"][0]


@needs_distributed
@pytest.mark.parametrize("case", [case for case in CASES if case != "ddp unused parameters"])
def test_losses_are_close_to_those_of_whole_batches(reports: Reports, case: str) -> None:
    """The sums are rounded elsewhere than in one process that sees whole batches."""
    for report in (report[case] for report in reports):
        assert report["losses"] == pytest.approx(report["one process, whole batch"], rel=RTOL)


@needs_distributed
@pytest.mark.parametrize("case", [*DDP, *FSDP])
def test_losses_are_close_to_those_of_fp32(reports: Reports, case: str) -> None:
    """As in one process."""
    for report in (report[case] for report in reports):
        assert report["losses"] == pytest.approx(report["one process, fp32"], rel=RTOL_FP32)


@needs_distributed
@pytest.mark.parametrize(
    ("case", "forwards"),
    [
        ("ddp", 1),
        ("ddp static graph", 2),
        ("ddp bucket view", 2),
        ("fsdp", 1),
        ("fsdp checkpoints", 2),
        ("fsdp mixed", 2),
    ],
)
def test_checkpoints_are_recomputed(reports: Reports, case: str, forwards: int) -> None:
    """That each was, while casts were off, is what makes its losses mean something."""
    assert [report[case]["forwards a step"] for report in reports] == [forwards] * WORLD_SIZE


@needs_distributed
@pytest.mark.parametrize("case", ["ddp", "fsdp"])
def test_no_cast_of_a_parameter_is_kept(reports: Reports, case: str) -> None:
    """Where that is asked for; FSDP2 gathers the parameter again before its backward."""
    for report in reports:
        assert report[case]["low matrices saved"] > 0
        assert report[f"{case} casting again"]["low matrices saved"] == 0


@pytest.mark.sampled(2)
@needs_distributed
def test_fsdps_own_mixed_precision(reports: Reports) -> None:
    """Weights come gathered in bf16, and the ops follow (pytorch #102731, #105348)."""
    for report in reports:
        assert report["fsdp"]["weights in forward"] == ["float32"]
        assert report["fsdp mixed"]["weights in forward"] == ["bfloat16"]
        assert report["fsdp mixed"]["losses"] != report["fsdp"]["losses"]


@needs_distributed
def test_sharded_gradients_are_clipped_in_fp32(reports: Reports) -> None:
    """The norm, and the gradients after clipping, are those with casts off bit for bit."""
    for report in (report["fsdp"] for report in reports):
        assert report["clipping is that of fp32"]
        assert report["clipping changes gradients"]


@needs_distributed
def test_sharded_state_dict(reports: Reports) -> None:
    """Model and optimizer go on from a distributed checkpoint as if nothing had happened."""
    for report in (report["fsdp"] for report in reports):
        assert report["sharded state"] == ["float32"]
        assert report["losses after loading"] == report["losses go on"]
        assert report["losses go on"][0] < report["losses"][0]


@needs_distributed
@pytest.mark.parametrize(("rank", "start_method"), [(0, "spawn"), (1, "fork")])
def test_workers_of_a_data_loader_cast(reports: Reports, rank: int, start_method: str) -> None:
    """A forked one inherits the conversion, a spawned one runs the script's own convert."""
    expected = {"start method": start_method, "matmuls": ["torch.bfloat16"]}
    assert reports[rank]["loader"] == expected


# --- the example --------------------------------------------------------------------------------


def run_torchrun(*arguments: str, directory: Path) -> str:
    """Returns what ``torchrun ARGUMENTS`` prints with two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    process = subprocess.Popen(
        [*command, str(WORLD_SIZE), *arguments],
        cwd=directory,
        env={**ENVIRONMENT, "TMPDIR": str(directory)},  # torchrun leaves its logs there
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.terminate()  # not kill: torchrun then ends its workers
        process.wait(TIMEOUT_S)
    assert process.returncode == 0, output
    return output


@pytest.mark.sampled(4)
@needs_distributed
def test_example(tmp_path: Path) -> None:
    """The command of its docstring runs, the losses agree, and each rank says that it cast."""
    output = run_torchrun(str(EXAMPLE), "--steps", "5", directory=tmp_path)
    rows = re.findall(r"^ +\d+ +(\S+) +(\S+) +(\S+) +(\S+)$", output, re.MULTILINE)
    assert len(rows) == 5
    for fp32, alone, ddp, fsdp in (map(float, row) for row in rows):
        assert alone == pytest.approx(fp32, rel=RTOL_FP32)
        assert [ddp, fsdp] == pytest.approx([alone, alone], rel=RTOL)
    assert any(fp32 != alone for fp32, alone, _, _ in rows)
    found = "output bfloat16, parameters float32, gradients float32, optimizer state float32"
    lines = [f"rank {rank}\n  DDP:   {found}\n  FSDP2: {found}\n" for rank in range(WORLD_SIZE)]
    assert output.endswith("".join(lines))
