"""Runs the tests that need a GPU, and prints one table: what is to run first on a machine with one.

    python scripts/gpu.py                # all of tests/integration/test_cuda.py
    python scripts/gpu.py -k memory      # with pytest's arguments

Needs torch with a CUDA device, hmpx, pytest and transformers. Ends with 1 where a test failed or none ran.
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

import pytest
import torch

import hmpx

ROOT = Path(__file__).resolve().parent.parent


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
    return int(status) or int(not has_run)


if __name__ == "__main__":
    sys.exit(main())
