"""``hmpx run --report``: a report however the program ends, of each process."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from hmpx.reports import merged, read_json
from tests import forks

SCRIPT = """
import os, sys, torch
linear = torch.nn.Linear(4, 4)
for _ in range(3):
    linear(torch.ones(2, 4))
os.chdir("/")
{end}
"""


def run(
    directory: Path, name: str, end: str = "", environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a script that makes three calls and then does ``end``."""
    script = directory / "script.py"
    script.write_text(SCRIPT.format(end=end))
    command = ["-m", "hmpx", "run", "--report", name, str(script)]
    return forks.run(*command, cwd=directory, env=environment)


KILL = "import signal; os.kill(os.getpid(), signal.{}); import time; time.sleep(60)"


@pytest.mark.parametrize(
    ("end", "status", "error"),
    [
        ("", 0, None),
        ("raise KeyError('x')", 1, "KeyError: 'x'"),
        ("sys.exit(3)", 3, "SystemExit: 3"),
        ("os._exit(3)", 3, "os._exit"),
        ("os.execv(sys.executable, ['python', '-c', 'raise SystemExit(5)'])", 5, "os.execv"),
        (KILL.format("SIGTERM"), -signal.SIGTERM, "SIGTERM"),
        (KILL.format("SIGHUP"), -signal.SIGHUP, "SIGHUP"),
        ("try:\n    " + KILL.format("SIGTERM") + "\nfinally:\n    os._exit(7)", -15, "SIGTERM"),
    ],
    ids=["ends", "crashes", "exits", "_exit", "exec", "SIGTERM", "SIGHUP", "no handler of ours"],
)
def test_a_report_is_written_however_a_program_ends(
    tmp_path: Path, end: str, status: int, error: str | None
) -> None:
    """Where the command was run, whatever the program's directory is by then."""
    done = run(tmp_path, "report.json", end)
    assert done.returncode == status
    report = read_json(tmp_path / "report.json")
    assert [(row.op, row.calls, row.dtype) for row in report.rows] == [("linear", 3, "bfloat16")]
    assert report.error == error
    assert f"hmpx: report: {tmp_path / 'report.json'}" in done.stderr


FORK = """
import multiprocessing, signal, time
def work():
    linear(torch.ones(2, 4))
    {end}
context = multiprocessing.get_context("fork")
processes = [context.Process(target=work) for _ in range(2)]
for each in processes:
    each.start()
for each in processes:
    each.join()
linear(torch.ones(2, 4))
"""


@pytest.mark.parametrize(
    "end",
    [
        "",
        "sys.exit(1)",
        "1 / 0",
        "os._exit(2)",
        "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)",
    ],
)
def test_calls_of_forked_processes_are_added(tmp_path: Path, end: str) -> None:
    """Each call once, however they end."""
    done = run(tmp_path, "report.json", FORK.format(end=end))
    assert done.returncode == 0
    report = read_json(tmp_path / "report.json")
    assert sum(row.calls for row in report.rows if row.op == "linear") == 3 + 1 + 2
    assert done.stderr.count("hmpx: report: ") == 1
    assert {each.name for each in tmp_path.iterdir()} == {"report.json", "script.py"}


def test_ranks_write_files_of_their_own_that_add_up(tmp_path: Path) -> None:
    """As under torchrun."""
    import os

    for rank in ("0", "1"):
        run(tmp_path, "report.json", "", {**os.environ, "WORLD_SIZE": "2", "RANK": rank})
    found = [read_json(tmp_path / f"report.rank{rank}.json") for rank in (0, 1)]
    both = merged(found)
    assert [(row.op, row.calls) for row in both.rows] == [("linear", 6)]
    assert both.totals.flops == sum(each.totals.flops for each in found)
    assert both.about["rank"] == "0, 1"


def test_a_directory_is_refused_before_the_program_runs(tmp_path: Path) -> None:
    """Since nothing could be written there afterwards."""
    (tmp_path / "report.json").mkdir()
    done = run(tmp_path, "report.json", "print('ran')")
    assert (done.returncode, done.stdout) == (2, "")
    assert "report.json is a directory; name a file in it" in done.stderr
