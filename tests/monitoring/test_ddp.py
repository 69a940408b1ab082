"""Figures of two processes that train together are those of both; rank 0 logs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch.distributed

import hmpx
from tests import forks

WORKER = Path(__file__).parent / "ddp_worker.py"


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without it")
def test_figures_are_of_all_processes(tmp_path: Path) -> None:
    source = str(Path(hmpx.__file__).parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source}
    programs = [([str(WORKER), str(rank), str(tmp_path)], environment) for rank in range(2)]
    forks.run_together(programs)
    first, second = (
        json.loads((tmp_path / f"{rank}.json").read_text("utf-8")) for rank in range(2)
    )
    assert first["figures"] == second["figures"]
    assert first["figures"]["hmpx/linear/input/zeros"] == 0.5
    assert first["figures"]["hmpx/linear/activation/thirds.error"] > 0
    assert (first["steps"], second["steps"]) == (2, 0)
    assert first["alarms"] == second["alarms"] == ["hmpx/linear/input/zeros"]
