"""Files that earlier versions wrote still load: reports, traces, journals, policies and contracts.

`python -m tests.test_old_files DIRECTORY` writes new ones, with the hmpx that is imported then.
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hmpx
from hmpx.reports import read_json

OLD = Path(__file__).parent / "old"

CPU: Any = {"device_types": {"cpu"}, "legalize": "never"}


class Model(nn.Module):
    """A product, and a sum that cancels."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        with torch.no_grad():
            self.linear.weight.copy_(torch.arange(32.0).view(4, 8).sin())
            self.linear.bias.fill_(0.125)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) + 256.0) - 256.0


X = torch.arange(16.0).view(2, 8).cos()


def tuned(journal: Path) -> hmpx.Tuned:
    options: Any = {"device_types": {"cpu"}, "progress": False, "journal": journal}
    return hmpx.tune(Model(), [X, X + 1], **options)


def write(directory: Path) -> None:
    """Writes a file of each kind."""
    with hmpx.convert(**CPU), hmpx.record() as rec:
        Model()(X).softmax(-1).sum().backward()
    rec.to_json(directory / "report.json")
    for name, low in (("fp32", []), ("bf16", ["linear"])):
        policy = {"lists": "none", "low": low}
        with hmpx.convert(policy=policy, **CPU), hmpx.trace(directory / f"{name}.hmpx"):
            Model()(X).sum().backward()
    tuned(directory / "journal.jsonl")


def test_reports() -> None:
    rows = read_json(OLD / "report.json").rows
    assert {(row.op, row.module, row.phase) for row in rows} >= {
        ("linear", "linear", "forward"),
        ("linear", "linear", "backward"),
        ("softmax", "", "forward"),
    }
    assert {row.location.rpartition("/")[2].partition(":")[0] for row in rows} == {
        "test_old_files.py"
    }


def test_traces() -> None:
    found = hmpx.diff_runs(OLD / "fp32.hmpx", OLD / "bf16.hmpx")
    assert found.first is None
    row = next(row for row in found.rows if row.op == "linear" and row.phase == "forward")
    assert (row.module, row.types, row.verdict) == ("linear", ("float32", "bfloat16"), "rounding")
    assert 0 < row.error < 0.01
    assert "test_old_files.py:" in row.location


def test_journals(tmp_path: Path) -> None:
    """A search of that version goes on, though torch is another."""
    first, *lines = (OLD / "journal.jsonl").read_text("utf-8").splitlines()
    header = {**json.loads(first), "torch": torch.__version__}
    header |= {"threads": torch.get_num_threads(), "hmpx": hmpx.__version__}
    journal = tmp_path / "journal.jsonl"
    journal.write_text("\n".join([json.dumps(header), *lines, ""]), "utf-8")
    best = tuned(journal)
    assert best.keep_fp32 == {"add", "sub"}
    assert journal.read_text("utf-8").count("\n") == 1 + len(lines), "nothing ran again"


def test_policies_whose_mode_was_a_phase() -> None:
    section = {"phase": "eval", "fp32": ["matmul"]}
    with pytest.warns(DeprecationWarning, match="'phase: eval' is now 'mode: eval'"):
        policy = hmpx.load_policy(policy={"low": ["matmul"], "sections": [section]})
    new = {"mode": "eval", "fp32": ["matmul"]}
    assert policy == hmpx.load_policy(policy={"low": ["matmul"], "sections": [new]})


def test_contracts_whose_mode_was_a_phase() -> None:
    line = {"op": "exp", "phase": "train", "compute": "float32"}
    with pytest.warns(DeprecationWarning, match="'phase: train' is now 'mode: train'"):
        contract = hmpx.expect({"expect": [line]}, mode="collect")
    with contract:
        torch.ones(2, dtype=torch.bfloat16).exp()
    assert [each.op for each in contract.breaches] == ["no call met this line"]


def test_fields_under_their_old_names() -> None:
    """They warn at the user's line."""
    found = hmpx.compare(Model(), X, **CPU)
    row: Any = found.rows[0]
    for old, new in (
        ("site", "location"),
        ("rel", "error"),
        ("propagated_rel", "propagated_error"),
    ):
        with pytest.warns(
            DeprecationWarning, match=rf"ComparedSite\.{old} is now \.{new}"
        ) as warned:
            assert getattr(row, old) == getattr(row, new)
        assert warned[0].filename == __file__


if __name__ == "__main__":
    write(Path(sys.argv[1]))


def test_a_frozen_model_loads() -> None:
    with hmpx.convert(device_types={"cpu"}, legalize="never"):
        model = torch.load(OLD / "frozen.pt", weights_only=False)
        assert model[0].weight.dtype == torch.bfloat16
        assert model(torch.ones(1, 4)).tolist() == [[-0.55859375, 0.458984375]]


@pytest.mark.parametrize("name", ["mxfp4_e2m1", "float8_e8m0fnu"])
def test_pickles_of_formats_load(name: str) -> None:
    with (OLD / f"{name}.pkl").open("rb") as file:
        assert pickle.load(file) == hmpx.formats.get(name)
