"""What a result was measured with: in the data of each tool, and on its page."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hmpx


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))


X = torch.ones(4, 8)
CPU: dict[str, Any] = {"device_types": {"cpu"}}


def recorded(**options: Any) -> Any:
    with hmpx.convert(**CPU, **options), hmpx.record() as rec:
        model()(X)
    return rec.report()


def linted(**options: Any) -> Any:
    with hmpx.convert(**CPU, **options), hmpx.lint() as findings:
        torch.arange(1000).to(torch.bfloat16)
    return findings


def repeated(**options: Any) -> Any:
    with hmpx.convert(**CPU, **options):
        return hmpx.invariance(model(), X)


#: Tool -> a result of it, under the conversion with these options.
TOOLS = {
    "record": recorded,
    "lint": linted,
    "invariance": repeated,
    "compare": lambda **options: hmpx.compare(model(), X, **CPU, **options),
    "plan": lambda **options: hmpx.plan(model, X, device="cpu", **options),
    "bench": lambda **options: hmpx.bench(model, X, variants=[], runs=1, run_s=0.0, device="cpu", **options),
}  # fmt: skip


@pytest.mark.parametrize("tool", TOOLS)
def test_a_result_says_what_it_was_measured_with(tool: str) -> None:
    """Its command, date, device and versions; the policy, by a digest that equal policies share."""
    found = [
        TOOLS[tool](),
        TOOLS[tool](low_precision_type="float16"),
        TOOLS[tool](lists="hmpx"),
    ]
    about = found[0].about
    assert about["torch"] == torch.__version__
    assert about["hmpx"] == hmpx.__version__
    assert about["device"]
    assert about["date"][:2] == "20"
    assert shlex.split(about["command"])[0] == Path(sys.orig_argv[0]).name
    digests = [each.about["digest of the policy"] for each in found]
    assert digests[0] == digests[2] != digests[1]
    assert about["policy"].startswith("bf16: ")
    assert json.loads(found[0].to_json())["about"] == about
    page = found[0].to_html()
    assert "<dt>digest of the policy</dt>" in page
    assert digests[0] in page


def test_tune_and_diff_runs_say_it_too(tmp_path: Path) -> None:
    """The latter of both runs."""
    tuned = hmpx.tune(model(), X, tolerance=1.0, progress=False, **CPU)
    assert tuned.about["torch"] == torch.__version__
    assert tuned.about["date"] in tuned.to_html()
    for name in ("a", "b"):
        with hmpx.trace(tmp_path / name):
            model()(X)
    page = hmpx.diff_runs(tmp_path / "a", tmp_path / "b").to_html()
    assert "<dt>torch of a</dt>" in page
    assert "<dt>torch of b</dt>" in page
