"""The zoo: what it measures, and a sample of its models under `convert()`."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import forks
from zoo import catalogue, table
from zoo.entry import Entry, normal

ROOT = Path(__file__).resolve().parents[2]


class Net(nn.Module):
    """A linear layer whose weights go through `arange`, `mul` and a buffer as they are built."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("scale", torch.arange(4).float() * 0.1, persistent=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": self.linear(x) * self.scale}


def entry(**options: Any) -> Entry:
    return Entry("net", "torch", "toys", Net, lambda model: {"x": normal(3, 8)}, **options)


def test_a_sample_has_all_families() -> None:
    """A sample takes from each family in turn, always the same models."""
    toys = [Entry(f"{f}{i}", "torch", f, Net, dict) for f in "abc" for i in range(3)]
    assert [e.name for e in catalogue.sample(toys, 5)] == ["a0", "b0", "c0", "a1", "b1"]


@pytest.mark.models
def test_a_sample_runs_as_in_fp32(tmp_path: Path) -> None:
    """Four architectures run as in fp32, with the weights of fp32, and about autocast's errors."""
    pytest.importorskip("transformers")
    results = tmp_path / "results.jsonl"
    command = [
        "-m", "zoo", "--models", "transformers", "--sample", "4",
        "--modes", "fp32", "autocast", "hmpx", "--results", str(results),
    ]  # fmt: skip
    done = forks.run(*command, cwd=ROOT)
    assert done.returncode in {0, 1}, done.stdout + done.stderr
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    models = table.by_model(lines)
    assert sum(map(len, models.values())) == 12
    known = table.causes()
    stops = table.stops(lines, "hmpx")
    assert [stop for stop in stops if "/".join(stop[:2]) not in known] == []
    assert {m: stop for m, modes in models.items() if (stop := modes["fp32"]["errors"])} == {}
    built = {m: modes["hmpx"]["built_differently"] for m, modes in models.items()}
    assert {m: names for m, names in built.items() if names} == {}
    medians = {
        ("/".join(key), of): statistics.median(ratios[1:])
        for key, _, of, ratios in table.over(lines)
    }
    assert {k: r for k, r in medians.items() if r > table.ACCEPTED and k[0] not in known} == {}
