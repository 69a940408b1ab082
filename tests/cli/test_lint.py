"""``hmpx lint`` and ``hmpx run --expect``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests import forks

SCRIPT = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 8))
with torch.autocast("cpu"):
    model(torch.randn(4, 32)).sum().backward()
t = torch.arange(1000).to(torch.bfloat16)
print("ran")
"""


def hmpx(folder: Path, *arguments: str) -> tuple[int, str, str]:
    (folder / "train.py").write_text(SCRIPT)
    done = forks.run("-m", "hmpx", *arguments, cwd=folder)
    return done.returncode, done.stdout, done.stderr


def test_findings_as_text_and_as_sarif_and_a_baseline(tmp_path: Path) -> None:
    status, shown, _ = hmpx(tmp_path, "lint", "train.py")
    assert status == 1
    lines = shown.splitlines()
    assert lines[0] == "ran"
    assert lines[1].startswith(
        "train.py:7: HP102 rounded integers: to_copy: 49% of the whole numbers "
    )
    assert lines[2] == "1 finding"
    assert hmpx(tmp_path, "lint", "--baseline", "known.txt", "--write-baseline", "train.py")[0] == 0
    assert hmpx(tmp_path, "lint", "--baseline", "known.txt", "train.py")[0] == 0
    _, shown, _ = hmpx(tmp_path, "lint", "--output-format", "sarif", "train.py")
    (run,) = json.loads(shown.partition("\n")[2])["runs"]
    (result,) = run["results"]
    assert result["ruleId"] == "HP102"
    place = result["locations"][0]["physicalLocation"]
    assert (place["artifactLocation"]["uri"], place["region"]["startLine"]) == ("train.py", 7)


FORKS = """
import os, sys, torch
torch.arange(1000).bfloat16()
if os.fork() == 0:
    sys.exit(3)
print("status", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
if os.fork():
    os.wait()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_child_that_the_program_forks_does_not_report(tmp_path: Path) -> None:
    (tmp_path / "forks.py").write_text(FORKS)
    done = forks.run("-m", "hmpx", "lint", "forks.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "status 3\n" in done.stdout
    assert done.stdout.count("HP102") == done.stdout.count("1 finding") == 1


@pytest.mark.parametrize(
    ("dtype", "status", "message"),
    [
        ("bfloat16", 0, ""),
        ("float32", 1, "contract.yaml:2: linear in 0 (train.py:6) computed in bfloat16, expected float32"),
        ("float33", 2, "contract.yaml:3: compute: unknown dtype 'float33'"),
    ],
)  # fmt: skip
def test_a_program_over_autocast_keeps_a_contract(
    dtype: str, status: int, message: str, tmp_path: Path
) -> None:
    (tmp_path / "contract.yaml").write_text(f"expect:\n- op: linear\n  compute: {dtype}\n")
    found, _, errors = hmpx(
        tmp_path, "run", "--no-convert", "--expect", "contract.yaml", "train.py"
    )
    assert found == status
    assert message in errors
