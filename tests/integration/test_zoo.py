"""The zoo: what it measures, and a sample of its models under `convert()`."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import forks
from zoo import catalogue, lines, measuring, table
from zoo.entry import Entry, normal
from zoo.modes import MODES

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


def test_fp32_is_at_no_distance_from_itself() -> None:
    """Two runs in fp32 are bit-equal, in outputs, gradients and weights."""
    first, second = (measuring.run(entry(), MODES["fp32"]) for _ in range(2))
    line = measuring.measure(first, second)
    assert line["errors"] == {}
    assert (line["outputs"], line["gradients"], line["built_differently"]) == (0.0, 0.0, [])


def test_distance_is_relative_to_fp32() -> None:
    """Norm of the difference over the norm, of all tensors together; masks are left out."""
    expected = [torch.tensor([3.0, float("-inf")]), torch.tensor([4.0])]
    actual = [torch.tensor([3.0, 1.0]), torch.tensor([4.5])]
    assert measuring.distance(actual, expected) == measuring.Distance(0.1, 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_counted(value: float) -> None:
    """NaNs and infinities beside finite numbers of fp32 are counted, and no distance is given."""
    found = measuring.distance([torch.tensor([1.0, value])], [torch.ones(2)])
    assert found == measuring.Distance(None, 1)


def test_an_error_is_kept_with_its_stage() -> None:
    """What fails in a stage ends what depends on it, and names the class and the first line."""

    def fail(model: nn.Module, batch: Mapping[str, Any]) -> None:
        raise ValueError("no such luck\nsecond line")

    run = measuring.run(entry(forward=fail), MODES["fp32"])
    assert run.errors == {
        "forward": "ValueError: no such luck",
        "train": "ValueError: no such luck",
    }


def test_stops_are_those_of_one_mode_alone() -> None:
    """An error that fp32 or autocast has too is not hmpx's."""
    base = {"library": "l", "model": "m", "family": "f"}
    lines = [
        {**base, "mode": "fp32", "errors": {"step": "E"}},
        {**base, "mode": "autocast", "errors": {"long": "E"}},
        {**base, "mode": "hmpx", "errors": {"step": "E", "long": "E", "forward": "F"}},
    ]
    assert table.stops(lines, "hmpx") == [("l", "m", "forward", "F")]


def test_ratio_is_to_autocast_of_the_same_type() -> None:
    """fp16 is compared with autocast's fp16."""
    lines = {
        name: {"outputs": value}
        for name, value in {"autocast": 0.02, "autocast fp16": 0.002, "hmpx fp16": 0.003}.items()
    }
    assert table.ratio(lines, "hmpx fp16", "outputs") == pytest.approx(1.5)


class Normed(nn.Module):
    """Calls ops of two lines of the default, and one that HMP's list has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": self.norm(self.linear(x).float() + 500).softmax(-1)}


def test_a_line_is_measured_by_what_happens_without_it() -> None:
    """And one of another set by what it adds; each model has lines for the ops that it calls."""
    normed = Entry("normed", "torch", "toys", Normed, lambda model: {"x": normal(3, 8)})
    found = {(m["is_added"], m["kind"], m["op"]): m for m in lines.measure(normed)}
    assert {(False, "low", "linear"), (False, "fp32", "softmax"), (True, "low", "layer_norm")} <= {
        *found
    }
    assert found[False, "low", "linear"]["outputs"] < 0.1
    assert found[True, "low", "layer_norm"]["outputs"] > 2
    text = "\n".join(lines.tables(found.values()))
    assert re.search(r"^\| `layer_norm` \| low \| 1 \| [\d.]+ \| [\d.]+ \(normed\) \|", text, re.M)


def test_a_sample_has_all_families() -> None:
    """A sample takes from each family in turn, always the same models."""
    toys = [Entry(f"{f}{i}", "torch", f, Net, dict) for f in "abc" for i in range(3)]
    assert [e.name for e in catalogue.sample(toys, 5)] == ["a0", "b0", "c0", "a1", "b1"]


@pytest.mark.models
def test_a_sample_runs_as_in_fp32(tmp_path: Path) -> None:
    """A dozen architectures run as in fp32, with the weights of fp32, and about autocast's errors."""
    pytest.importorskip("transformers")
    results = tmp_path / "results.jsonl"
    command = [
        "-m", "zoo", "--models", "transformers", "--sample", "12",
        "--modes", "fp32", "autocast", "hmpx", "--results", str(results),
    ]  # fmt: skip
    done = forks.run(*command, cwd=ROOT)
    assert done.returncode in {0, 1}, done.stdout + done.stderr
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    models = table.by_model(lines)
    assert sum(map(len, models.values())) == 36
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


def test_what_is_over_is_shown_with_its_other_seeds() -> None:
    """A ratio over the accepted one comes with those of all seeds; others' don't appear."""
    lines = [
        {"library": "l", "family": "f", "model": model, "mode": mode, "seed": seed, "errors": {}}
        | {"outputs": error}
        for model, ratios in {"far": (1.5, 0.9, 1.0), "near": (1.05, 3.0, 3.0)}.items()
        for seed, ratio in zip((measuring.SEED, 12, 13), ratios, strict=True)
        for mode, error in (("autocast", 0.01), ("hmpx", 0.01 * ratio))
    ]
    [(key, mode, of, ratios)] = table.over(lines)
    assert (key, mode, of, [round(r, 6) for r in ratios]) == (
        ("l", "far"), "hmpx", "outputs", [1.5, 0.9, 1.0],
    )  # fmt: skip
    assert "| far | hmpx | outputs | 1.50 | 0.90 1.00 | 0.95 |  |" in table.document(lines)
