"""Processes and threads train together as one process does: DDP, FSDP2, DTensor, DataParallel."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hmpx
from hmpx import Policy
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
T = TypeVar("T")

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
def test_full_state_dict(reports: Reports) -> None:
    """It holds the fp32 parameters that one process trains, and loads into either kind of model."""
    gathered = reports[0]["fsdp"]
    assert gathered["full state"] == ["float32"]
    assert gathered["full state is that of one process"]
    assert gathered["plain model loads the full state"]
    for report in reports:
        assert report["fsdp"]["sharded model loads the full state"]


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


# --- threads ------------------------------------------------------------------------------------


def in_new_threads(*functions: Callable[[], T]) -> list[T]:
    """Returns what each function returns, run in a thread of its own, all of them at once."""
    everyone_is_in = threading.Barrier(len(functions))

    def run(function: Callable[[], T]) -> T:
        everyone_is_in.wait(TIMEOUT_S)
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(run, functions))


class Middle(nn.Module):
    """Three layers; records the dtype of the product in the middle one, each time it runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, use_reentrant: bool | None = None) -> Tensor:
        hidden = self.layers[0](x)
        if use_reentrant is None:
            hidden = self.middle(hidden)
        else:
            hidden = checkpoint(self.middle, hidden, use_reentrant=use_reentrant)
        return self.layers[2](hidden).float().square().mean()

    def middle(self, hidden: Tensor) -> Tensor:
        output = self.layers[1](hidden)
        self.seen.append(output.dtype)
        return torch.tanh(output)

    def take_gradients(self) -> list[Tensor]:
        """Returns the gradients, and leaves none."""
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.zero_grad()
        return gradients


@pytest.mark.parametrize("use_reentrant", [None, True, False])
@pytest.mark.parametrize("backward_in", ["the caller", "another thread"])
def test_replicas_in_threads_cast_as_the_caller_does(
    backward_in: str, use_reentrant: bool | None
) -> None:
    """The scheme of nn.DataParallel: same gradients as without (pytorch #54912, #125186)."""
    model = Middle()
    parts = torch.randn(8, 8).chunk(2)
    with hmpx.convert(policy=Policy.from_ops(low=["linear"])):
        torch.stack([model(part) for part in parts]).sum().backward()
        expected = model.take_gradients()
        model.seen.clear()
        losses = in_new_threads(*(lambda x=part: model(x, use_reentrant) for part in parts))
        total = torch.stack(losses).sum()
        if backward_in == "the caller":
            total.backward()
        else:
            in_new_threads(total.backward)
    assert model.seen == [torch.bfloat16] * (2 if use_reentrant is None else 4)
    for actual, gradient in zip(model.take_gradients(), expected, strict=True):
        torch.testing.assert_close(actual, gradient, rtol=0, atol=0)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("off", ["forward", "backward"])
def test_a_backward_in_another_thread_recomputes_as_the_forward_ran(
    off: str, use_reentrant: bool
) -> None:
    """Whether casts are on or off in that thread, and for others meanwhile (pytorch #125186)."""
    model, x = Middle(), torch.randn(4, 8)

    def forward(use_reentrant: bool | None) -> Tensor:
        with hmpx.disable_casts() if off == "forward" else contextlib.nullcontext():
            return model(x, use_reentrant)

    def backward(loss: Tensor) -> bool:
        with hmpx.disable_casts() if off == "backward" else contextlib.nullcontext():
            loss.backward()
            return hmpx.casts_enabled()

    with hmpx.convert(policy=Policy.from_ops(low=["linear"])):
        backward(forward(None))
        expected = model.take_gradients()
        loss = forward(use_reentrant)
        assert in_new_threads(lambda: backward(loss)) == [off == "forward"]
        assert hmpx.casts_enabled()
    assert model.seen == [torch.float32 if off == "forward" else torch.bfloat16] * 3
    for actual, gradient in zip(model.take_gradients(), expected, strict=True):
        torch.testing.assert_close(actual, gradient, rtol=0, atol=0)


def test_threads_that_train_at_once_leave_each_other_alone() -> None:
    """One with casts off, one with casts on: each trains as it does alone (pytorch #54912)."""
    untrained, batches = Middle(), [torch.randn(4, 8) for _ in range(20)]

    def train(is_off: bool) -> tuple[list[Tensor], set[torch.dtype]]:
        model = copy.deepcopy(untrained)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for x in batches:
            with hmpx.disable_casts() if is_off else contextlib.nullcontext():
                loss = model(x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()], set(model.seen)

    with hmpx.convert(policy=Policy.from_ops(low=["linear"])):
        expected = [train(True), train(False)]
        actual = in_new_threads(lambda: train(True), lambda: train(False))
    assert [seen for _, seen in actual] == [{torch.float32}, {torch.bfloat16}]
    for (parameters, _), (alone, _) in zip(actual, expected, strict=True):
        for parameter, value in zip(parameters, alone, strict=True):
            torch.testing.assert_close(parameter, value, rtol=0, atol=0)


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


@needs_distributed
def test_example_without_torchrun_says_how_to_start_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own error, not one of torch's about a missing variable."""
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE)])
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit, match=r"^2$"):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "start me with torchrun" in capsys.readouterr().err
