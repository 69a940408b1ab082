"""Training in the recipes of FP8 and FP4 hardware: nothing becomes NaN, compiled and not, on processes."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch
import torch.distributed

import hmpx
from tests import forks

from .recipes import RECIPES, Network, losses, policy

STEPS = 40


def trained(recipe: str, steps: int, *, is_compiled: bool = False) -> list[float]:
    torch.manual_seed(0)
    model = Network()
    with hmpx.convert(policy=policy(recipe)):
        if is_compiled:
            return losses(torch.compile(model, fullgraph=True, backend="aot_eager"), steps)  # type: ignore[arg-type]
        return losses(model, steps)


@pytest.mark.parametrize("recipe", RECIPES)
def test_models_learn(recipe: str) -> None:
    """No loss is NaN, and the last are less than half of the first."""
    found = trained(recipe, STEPS)
    assert all(map(math.isfinite, found))
    assert sum(found[-4:]) / 4 < found[0] / 2


@pytest.mark.sampled(6)
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_models_learn_the_same(recipe: str) -> None:
    """One graph: the first losses are those of the model as it is, later ones but for the order of sums."""
    found, expected = trained(recipe, STEPS, is_compiled=True), trained(recipe, 2)
    assert all(map(math.isfinite, found))
    assert found[:2] == pytest.approx(expected, rel=1e-4)
    assert sum(found[-4:]) / 4 < found[0] / 2


@pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without distributed"
)
@pytest.mark.sampled(2)
def test_processes_learn_together(tmp_path: Path) -> None:
    """DDP on two: their weights are the same afterwards, bit for bit, and losses fall."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    programs = [
        (["-m", "tests.integration.recipes_worker", rank, "2", str(tmp_path)], environment)
        for rank in ("0", "1")
    ]
    ended = forks.run_together(programs, timeout=300)
    assert [each.returncode for each in ended] == [0, 0], "".join(e.stderr for e in ended)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text("utf-8")) for rank in "01")
    for recipe in RECIPES:
        assert first[recipe]["parameters"] == second[recipe]["parameters"]
        assert all(map(math.isfinite, first[recipe]["losses"]))
        assert first[recipe]["losses"][-1] < 0.8 * first[recipe]["losses"][0]
