"""Figures of two processes that train together are those of both; rank 0 logs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

import hmpx
from tests import forks

WORKER = Path(__file__).parent / "ddp_worker.py"

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without it"
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process has written down."""
    folder = tmp_path_factory.mktemp("ddp")
    source = str(Path(hmpx.__file__).parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source}
    programs = [([str(WORKER), str(rank), str(folder)], environment) for rank in range(2)]
    forks.run_together(programs)
    return [json.loads((folder / f"{rank}.json").read_text("utf-8")) for rank in range(2)]


def test_figures_are_of_all_processes(found: list[dict[str, Any]]) -> None:
    first, second = (each["with_ddp"] for each in found)
    assert first["figures"] == second["figures"]
    assert first["figures"]["hmpx/linear/input/zeros"] == 0.5
    assert first["figures"]["hmpx/linear/activation/thirds.error"] > 0
    assert (first["steps"], second["steps"]) == (2, 0)
    assert first["alarms"] == second["alarms"] == ["hmpx/linear/input/zeros"]


def test_figures_of_sharded_parameters_are_those_of_whole_ones(found: list[dict[str, Any]]) -> None:
    first, second = (each["with_fsdp"] for each in found)
    assert first["figures"] == second["figures"]
    whole = first["whole"]
    assert {name: first["figures"][name] for name in whole} == pytest.approx(whole, rel=1e-12)


def test_a_step_takes_one_all_reduce_also_where_processes_differ(
    found: list[dict[str, Any]],
) -> None:
    first, second = (each["with_steps_that_differ"] for each in found)
    assert first == second
    assert first["reduced"] == [2, 1, 2, 1, 1, 1]  # again only for names that are new
    figures = first["figures"]
    assert [each["hmpx/mul/activation/amax"] for each in figures] == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert [each["hmpx/mul/activation/zeros"] for each in figures] == [0.5] * 6
    alone = [each.get("hmpx/sigmoid/activation/amax") for each in figures]
    assert alone == [None, None, 0.5, 0.5, 0.5, None]
    assert figures[2]["hmpx/exp2/activation/nonfinite"] == 1.0
