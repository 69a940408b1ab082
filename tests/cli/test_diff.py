"""``hmpx diff``: the ops and the calls that two policies decide otherwise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hmpx.cli import main
from hmpx.reports import Report

from ..reports.samples import row

#: Queries and keys are normalized, values are not.
ATTENTION = """
import torch
from torch import nn
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm = nn.RMSNorm(16)
    def forward(self, x):
        q, k = self.norm(self.q(x)), self.norm(self.k(x))
        return nn.functional.scaled_dot_product_attention(q, k, self.v(x))
Attention()(torch.randn(1, 2, 4, 16))
"""


def test_two_versions_of_torchs_lists(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "autocast-cuda@2.11", "autocast-cuda@2.12"]) == 1
    assert capsys.readouterr().out.split() == [
        *("op", "autocast-cuda@2.11", "autocast-cuda@2.12"), *("rms_norm", "FIRST", "FP32", "fp32"),
    ]  # fmt: skip
    assert main(["diff", "hmpx", "hmpx"]) == 0
    assert capsys.readouterr().out == "no difference\n"
    assert main(["diff", "hmpx", "hmp@2.11"]) == 2
    assert "neither a shipped set" in capsys.readouterr().err


def test_options_of_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = []
    for option in ("", " accumulate=float32"):
        path = tmp_path / f"policy{len(names)}.yaml"
        path.write_text(f"lists: none\nlow: [mm{option}]\n")
        names.append(str(path))
    assert main(["diff", *names]) == 1
    assert capsys.readouterr().out.split()[3:] == [
        *("mm", "LOW", "bf16"), *("LOW", "bf16", "accumulate=fp32"),
    ]  # fmt: skip


def test_a_program_whose_attention_gets_two_dtypes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("attend.py").write_text(ATTENTION)
    assert main(["diff", "autocast-cuda@2.11", "autocast-cuda@2.12", "--", "attend.py"]) == 1
    shown = capsys.readouterr().out
    assert "rms_norm  norm    attend.py:10  fp32 -> bf16  fp32 -> fp32" in shown
    assert (
        "mixed siblings: scaled_dot_product_attention at attend.py:11 gets bf16 and fp32" in shown
    )
    (sizes,) = re.findall("bytes read and written by ops: (.*) before, (.*) after", shown)
    before, after = (int(each.replace(",", "")) for each in sizes)
    assert after > before


def test_two_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    common = row(op="mm")
    Report((common, row(), row(op="relu"))).to_json("before.json")
    Report((common, row(dtype="float32"), row(op="gelu"))).to_json("after.json")
    assert main(["diff", "before.json", "after.json"]) == 1
    assert [each.split() for each in capsys.readouterr().out.splitlines()[1:]] == [
        *(["linear", "blocks.0.fc1", "train.py:12", "bf16", "->", "bf16", "fp32", "->", "bf16"],),
        *(["2", "calls", "at", "1", "place", "compute", "otherwise"],),
        *(["only", "under", "A:", "relu", "in", "blocks.0.fc1", "at", "train.py:12"],),
        *(["only", "under", "B:", "gelu", "in", "blocks.0.fc1", "at", "train.py:12"],),
    ]
    assert main(["diff", "before.json", "before.json"]) == 0
    assert capsys.readouterr().out == "no difference\n"
    assert main(["diff", "before.json", "none.json"]) == 2
    assert "none.json" in capsys.readouterr().err


def test_a_program_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit('no data')")
    assert main(["diff", "hmpx", "lean", "--", str(script)]) == 2
    assert "failed under hmpx: no data" in capsys.readouterr().err
