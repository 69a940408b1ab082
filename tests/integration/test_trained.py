"""Trained models of the zoo: scores, modes, tuning and the table, on a model made here."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

import hmpx
from zoo.results import Results
from zoo.trained import models, running, scores, table
from zoo.trained.task import Batch, Task

LISTS = Path(__file__).resolve().parents[2] / "examples" / "trained_lists"


class Net(nn.Module):
    """A sum that cancels in low precision, between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last((self.first(x).float() + 300) - 300)


def batch(seed: int) -> Batch:
    return {"x": torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))}


TASK = Task(
    "net", "torch", "torch", "a net", Net, batch, lambda model, batch: {"y": model(batch["x"])},
    {"error, %": scores.error_percent("y")}, is_distance=True,
)  # fmt: skip


def test_a_trained_model_is_judged_tuned_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each mode gets scores beside float64's, a set is found and written, and all of it is in the table."""
    monkeypatch.setattr(running, "LISTS", tmp_path / "lists")
    results, said = Results(tmp_path / "results.jsonl"), []
    absent = dataclasses.replace(TASK, name="absent", module="no_such_package", package="no-such")
    modes = ["fp32", "autocast", "hmpx", "hmpx frozen", "tune bfloat16"]
    running.sweep([absent, TASK], results, modes, say=said.append)
    assert said[0] == "absent: left out, since no_such_package isn't installed: pip install no-such"
    lines = {line["mode"]: line for line in results.lines.values()}
    assert {mode: line["errors"] for mode, line in lines.items()} == {mode: {} for mode in modes}
    assert lines["fp32"]["outputs"] < 1e-4 < lines["hmpx"]["outputs"]
    assert lines["hmpx"]["scores"] == lines["hmpx frozen"]["scores"]
    assert lines["hmpx"]["flops"] == 1.0
    assert {"add", "sub"} <= {*lines["tune bfloat16"]["kept"]}
    assert len(lines["tune bfloat16"]["fresh"]) == 6
    with hmpx.convert(policy=tmp_path / "lists" / "net.bfloat16.yaml") as session:
        assert session.policy["add"].cast_policy is hmpx.CastPolicy.FP32
    count = len(said)
    running.sweep([TASK], results, modes, say=said.append)
    assert len(said) == count, "what has results doesn't run again"
    text = table.document(results.lines.values(), {"net": "a net"})
    assert "| net | error, % |" in text
    assert "| net | bfloat16 |" in text


def test_shipped_lists_load_and_are_of_models_in_the_catalogue() -> None:
    """Each list in examples/ is a policy of a search that the catalogue has."""
    known = {running.file_of(task, low).name for task in models.tasks() for low in running.TUNED}
    for path in LISTS.glob("*.yaml"):
        assert path.name in known
        hmpx.load_policy(policy=path, strict=True)
