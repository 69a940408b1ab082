"""What zoo/ says of other packages under a conversion: why tests fail, and what stays fp32."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that imports a module of zoo/, for one test."""

    def load_module(name: str) -> Any:
        monkeypatch.syspath_prepend(str(ROOT / "zoo"))
        for each in ("peers", "peers_plugin", "pipelines"):
            monkeypatch.delitem(sys.modules, each, raising=False)
        return importlib.import_module(name)

    return load_module


#: Metrics that compute with sums, products and quotients, whose examples are run.
METRICS = (
    "classification.accuracy",
    "classification.calibration_error",
    "regression.explained_variance",
    "text.perplexity",
    "image.psnr",
)


def test_metrics_are_bit_equal(load: Any) -> None:
    """The examples of torchmetrics' docstrings give the same bits under a conversion."""
    pipelines = load("pipelines")
    names = [f"torchmetrics.functional.{metric}" for metric in METRICS]
    found, unusable = pipelines.verdicts(list(pipelines.docstring_cases("torchmetrics", *names)))
    assert [(each.name, str(each.hmpx), each.ops) for each in found if each.hmpx] == []
    assert len(found) >= len(METRICS)
    assert len(unusable) <= len(found) // 4
