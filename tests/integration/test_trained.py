"""Trained models of the zoo: scores, modes, tuning and the table, on a model made here."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

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


def test_what_stops_is_kept_with_its_error(tmp_path: Path) -> None:
    """An error in one mode ends that mode alone."""

    def run(model: Any, batch: Batch) -> dict[str, torch.Tensor]:
        y = model(batch["x"])
        return {"y": torch.from_numpy(y.detach().numpy())}

    results = Results(tmp_path / "results.jsonl")
    task = dataclasses.replace(TASK, run=run)
    running.sweep([task], results, ["fp32", "autocast"], say=lambda line: None)
    errors = {line["mode"]: line["errors"] for line in results.lines.values()}
    assert errors["fp32"] == {}
    assert errors["autocast"] == {"run": "TypeError: Got unsupported ScalarType BFloat16"}
    text = table.document(results.lines.values(), {"net": "a net"})
    assert "| net | autocast | TypeError: Got unsupported ScalarType BFloat16 |" in text


@pytest.mark.parametrize(
    ("score", "outputs", "expected"),
    [
        (scores.rank_correlation, {"similarity": [0.1, 0.5, 0.9], "truth": [0, 1, 2]}, 100),
        (scores.word_f1, {"logits": [2.0, -1, 3, -1], "truth": [1, 0, 0, 1]}, 50),
        (scores.true_over_false, {"speech": [0.9, 0.2, 0.4], "truth": [1, 0, 0]}, 1),
        (scores.separation, {"voices": [[1.0, 0], [1, 0.1], [0, 1], [0.1, 1]], "truth": [0, 0, 1, 1]}, 15.59),
        (scores.faces_found, {"boxes": [[0.0, 0, 9, 9]], "truth": [[0, 0, 10, 10], [20, 20, 30, 30]]}, 200 / 3),
        (scores.mean_precision, {"features": [[1.0, 0], [1, 0.1], [0, 1], [0.1, 1]], "truth": [0, 0, 1, 1]}, 100),
    ],
)  # fmt: skip
def test_scores(score: Any, outputs: dict[str, list[Any]], expected: float) -> None:
    """Scores of outputs whose values are known."""
    found = {name: torch.tensor(each) for name, each in outputs.items()}
    assert score(found, found) == pytest.approx(expected, rel=0.01)


def test_cents_of_a_tone() -> None:
    """The mean of the bins near the peak, against the truth."""
    bins = 20 * torch.arange(360.0)
    peak = torch.exp(-(((bins - 3010) / 25) ** 2))[None]
    assert scores.cents_off(peak, bins, torch.tensor([10 * 2 ** (3000 / 1200)])) == pytest.approx(
        10, abs=0.5
    )


def test_shipped_lists_load_and_are_of_models_in_the_catalogue() -> None:
    """Each list in examples/ is a policy of a search that the catalogue has."""
    known = {running.file_of(task, low).name for task in models.tasks() for low in running.TUNED}
    for path in LISTS.glob("*.yaml"):
        assert path.name in known
        with hmpx.convert(policy=path):
            pass
