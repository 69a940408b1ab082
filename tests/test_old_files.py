"""Files that an earlier hmpx wrote are read: reports, traces, journals, baselines, contracts, policies.

`write` made those in tests/golden/files, once: what it writes today is not compared with them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import hmpx
from hmpx.reports import read_json

FILES = Path(__file__).parent / "golden" / "files"


class Cancelling(nn.Module):
    """A layer of ones, and a sum that cancels."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        nn.init.ones_(self.linear.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) + 256) - 256


def x() -> torch.Tensor:
    return torch.arange(8.0).view(2, 4) / 8


def tuned(journal: Path) -> hmpx.Tuned:
    """A search in one thread; its fingerprints of tensors are exact sums."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return hmpx.tune(Cancelling(), x(), device_types={"cpu"}, journal=journal, progress=False)
    finally:
        torch.set_num_threads(threads)


def write(folder: Path) -> None:
    """Writes one file of each kind."""
    model, given = Cancelling(), x()
    with hmpx.trace(folder / "run.hmpx"):
        model(given)
    with hmpx.convert(device_types={"cpu"}, legalize="always"):
        with hmpx.record() as recorded:
            model(given).sum().backward()
        with hmpx.trace(folder / "converted.hmpx"):
            model(given)
    recorded.report().to_json(folder / "report.json")
    tuned(folder / "journal.jsonl").write(folder / "lists")
    (folder / "lists" / "report.html").unlink()


def test_reports() -> None:
    report = read_json(FILES / "report.json")
    calls = {(row.op, row.phase): row.calls for row in report.rows}
    assert calls["linear", "forward"] == calls["linear", "backward"] == 1
    [forward] = [row for row in report.rows if (row.op, row.phase) == ("linear", "forward")]
    assert forward.output_dtypes == ("bfloat16",)
    assert report.about["hmpx"] == "0.1.0"
    assert report.to_html()


def test_traces() -> None:
    found = hmpx.diff_runs(FILES / "run.hmpx", FILES / "converted.hmpx")
    assert [(row.op, row.phase) for row in found.rows][:1] == [("linear", "forward")]


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13.0+cpu"), reason="a journal is of one version of torch"
)
def test_journals(tmp_path: Path) -> None:
    """A search is continued: nothing is evaluated again, and nothing is written."""
    journal = tmp_path / "journal.jsonl"
    shutil.copy(FILES / "journal.jsonl", journal)
    best = tuned(journal)
    assert best.keep_fp32 == {"add", "sub"}
    assert journal.read_bytes() == (FILES / "journal.jsonl").read_bytes()


def test_lists() -> None:
    with hmpx.convert(lists=FILES / "lists") as session:
        assert session.options.legalize == "always"
        assert session.policy["add"].cast_policy is hmpx.CastPolicy.FP32


def test_what_journals_hold_is_json() -> None:
    lines = (FILES / "journal.jsonl").read_text("utf-8").splitlines()
    assert {"key", "value"} == {key for line in lines[1:] for key in json.loads(line)}
