"""Runs the tests that need a GPU, then times training steps: what is to run first on a machine with one.

    python scripts/gpu.py                # all of tests/integration/test_cuda.py, and at most 5 minutes of steps
    python scripts/gpu.py -k memory      # with pytest's arguments: tests alone

Needs torch with a CUDA device, hmpx, pytest and transformers. The figures of steps go to benchmarks/results. Ends with
1 where a test or a step failed, or no test ran.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import hmpx

ROOT = Path(__file__).resolve().parent.parent

#: Arguments of benchmarks/gpu_step.py, and `HMPX_NODES`.
STEPS = (
    ("", "on"),
    ("--candidates autocast hmpx", "off"),
    ("--mode graphed --candidates autocast hmpx --rounds 1", "on"),
    ("--model lstm --candidates fp32 autocast hmpx", "on"),
    ("--mode compiled --candidates autocast hmpx --rounds 1", "on"),
)
LONGEST_S = 300


class Rows:
    """A plugin of pytest: one row for each test, in the order in which they end."""

    def __init__(self) -> None:
        """Starts without any."""
        self.rows: list[tuple[str, str, str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes what came of a test, and the figure that it has recorded."""
        if report.when != "call" and report.passed:
            return
        figure = dict(report.user_properties).get("figure", "")
        if report.failed and not figure:
            figure = str(report.longrepr).strip().splitlines()[-1]
        elif report.skipped and isinstance(report.longrepr, tuple):
            figure = report.longrepr[-1]
        name = report.nodeid.partition("::")[2].removeprefix("test_")
        self.rows.append((name, report.outcome, f"{report.duration:.1f}", str(figure)))


def machine() -> str:
    """Returns the GPU's name and the versions."""
    gpu = "no CUDA device"
    if torch.cuda.is_available():
        gpu = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    return f"{gpu}, torch {torch.__version__}, hmpx {hmpx.__version__}"


def time_steps() -> bool:
    """Times each of `STEPS`; whether all came to their end."""
    program, are_good = ROOT / "benchmarks" / "gpu_step.py", True
    end_s = time.monotonic() + LONGEST_S
    for arguments, nodes in STEPS:
        command = [sys.executable, str(program), *arguments.split(), "--save"]
        print(f"\nHMPX_NODES={nodes} {program.name} {arguments}", flush=True)
        environment = {**os.environ, "HMPX_NODES": nodes}
        try:
            subprocess.run(
                command, env=environment, timeout=max(0, end_s - time.monotonic()), check=True
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(error, flush=True)
            are_good = False
    return are_good


def main() -> int:
    """Returns the exit status."""
    rows, output = Rows(), io.StringIO()
    arguments = [
        "-p",
        "no:randomly",
        "-p",
        "no:benchmark",
        "-W",
        "ignore::DeprecationWarning",  # of what torch.testing imports on a machine with CUDA
        "-W",
        f"ignore:torch {torch.__version__} is not as hmpx knows it:hmpx.HmpxWarning",
        "-q",
        str(ROOT / "tests" / "integration" / "test_cuda.py"),
        *sys.argv[1:],
    ]
    with contextlib.redirect_stdout(output):
        status = pytest.main(arguments, plugins=[rows])
    print(f"{machine()}\n\n| test | outcome | s | figure |\n|---|---|---|---|")
    for row in rows.rows:
        print(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |")
    if status:
        print(f"\n{output.getvalue()}")
    has_run = any(outcome == "passed" for _, outcome, _, _ in rows.rows)
    are_timed = sys.argv[1:] or not torch.cuda.is_available() or time_steps()
    return int(status) or int(not (has_run and are_timed))


if __name__ == "__main__":
    sys.exit(main())
